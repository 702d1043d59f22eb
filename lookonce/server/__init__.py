"""The gRPC server around each service: settings, authentication, quotas, drain, metrics."""
