"""The gRPC server around each service: settings, admission, receipt, errors, metrics, shutdown."""
