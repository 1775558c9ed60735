"""Starts the coordinator: reads who it is from stdin, listens, says where, and runs.

It binds before it imports torch, so that the launcher can start agents while the job loads.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import zmq

from ..protocol.bootstrap import CoordinatorBirth
from ..protocol.codec import MAX_PAYLOAD_BYTES
from ..protocol.errors import UserError
from ..protocol.keys import Authority
from ..protocol.sockets import Server
from .sinks import RunDirectory


def main() -> int:
    """Run the coordinator and return the exit code of the run."""
    birth = CoordinatorBirth.from_json(sys.stdin.readline())
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    authority = None if birth.tcp_address is None else Authority(context, dict(birth.allowed))
    try:
        control = _server(birth, "control", context, authority, birth.ports[0])
        data = _server(birth, "data", context, authority, birth.ports[1])
        files = RunDirectory(
            Path(birth.settings.run_dir), goes_on=birth.is_restarted or birth.resumes
        )
    except UserError as error:
        print(json.dumps({"refused": str(error)}), flush=True)  # noqa: T201
        return error.exit_code
    endpoints = {
        "control_ipc": control.ipc_endpoint,
        "control_tcp": control.tcp_endpoint,
        "data_ipc": data.ipc_endpoint,
        "data_tcp": data.tcp_endpoint,
    }
    print(json.dumps(endpoints), flush=True)  # noqa: T201  the launcher reads this line
    from .record import RunRecord
    from .service import Coordinator

    return Coordinator(birth, control, data, RunRecord(birth.settings, files)).run()


def _server(
    birth: CoordinatorBirth,
    name: str,
    context: zmq.Context[zmq.Socket[bytes]],
    authority: Authority | None,
    port: int,
) -> Server:
    address = birth.tcp_address
    if address is not None and port:
        address = f"{address}:{port}"
    sizes = {"max_frame_bytes": MAX_PAYLOAD_BYTES} if name == "data" else {}
    return Server(
        context,
        run_id=bytes.fromhex(birth.run_id),
        ipc=Path(birth.ipc_dir, f"{name}.sock"),
        tcp=address,
        keys=birth.keys,
        authority=authority,
        heartbeat_s=birth.settings.heartbeat_s,
        lease_s=birth.settings.lease_s,
        **sizes,
    )


if __name__ == "__main__":
    sys.exit(main())
