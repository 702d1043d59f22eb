"""Exit status 0 while the service of this container says SERVING: for HEALTHCHECK, as Kubernetes' own probes do it.

    check_health.py lookonce.encoder.v1.EncoderService

Asks LOOKONCE_HEALTH_LISTEN where that is set, else LOOKONCE_LISTEN, in plaintext: a service with certificates wants the
former.
"""

from __future__ import annotations

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_S = 3.0


def main() -> int:
    """Exit status; what is wrong goes to stderr."""
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
