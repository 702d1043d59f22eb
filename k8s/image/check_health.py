"""Checks the health of the service in this container, for HEALTHCHECK. The exit status is 0 if it says SERVING.

    check_health.py lookonce.encoder.v1.EncoderService

It asks LOOKONCE_HEALTH_LISTEN if set, otherwise LOOKONCE_LISTEN, in plaintext. A service with certificates therefore
needs LOOKONCE_HEALTH_LISTEN.
"""

from __future__ import annotations

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_S = 3.0


def main() -> int:
    """Returns the exit status, and prints the health or the error to stderr."""
    address = os.environ.get("LOOKONCE_HEALTH_LISTEN") or os.environ["LOOKONCE_LISTEN"]
    target = f"127.0.0.1:{address.rpartition(':')[2]}"
    with grpc.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(service=sys.argv[1]), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            print(f"{target}: {error.code().name}", file=sys.stderr)
            return 1
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    print(name, file=sys.stderr)
    return int(name != "SERVING")


if __name__ == "__main__":
    sys.exit(main())
