"""In the place of Kubernetes' client, which is not installed with this stand-in for Harbor."""

raise ImportError
