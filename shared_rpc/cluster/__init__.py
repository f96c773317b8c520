"""One build for the hosts of a cluster: the directory plans, agents beside the brokers carry it out."""
