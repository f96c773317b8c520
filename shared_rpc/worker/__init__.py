"""The worker: a process that imports the app and runs its endpoints, for a broker that holds their results."""
