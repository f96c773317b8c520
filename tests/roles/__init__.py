"""What people call: providers, clients and servers, in this process and in others."""
