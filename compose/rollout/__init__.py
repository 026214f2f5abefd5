"""The parts of a deployment, which compose/deploy.py puts together.

registry.py         opens the registry of the settings     operator_keys.py   the operator's keys
ends.py             connects a Deployer to its servers
control_client.py   signed commands to workers             remote.py          registry, files and broker of a worker
load_requests.py    asks workers to load and to unload     replicas.py        waits until the workers report it
active_version.py   reads the active version               files.py           packages and exports of this machine
"""

from __future__ import annotations

__all__: list[str] = []
