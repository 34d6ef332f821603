"""`trinity certs`: certificates and NATS credentials of a deployment."""
