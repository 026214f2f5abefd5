"""A token of SoftHSM in a folder of its own: a PKCS#11 library as that of an HSM, without the device."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

from tests.servers import require, require_module

__all__ = ["LABEL", "PIN", "SoftHsm"]

LABEL: Final = "penstock-test"
PIN: Final = "hunter2-8471"
_MODULES: Final = ("/usr/lib/softhsm/libsofthsm2.so", "/usr/lib64/softhsm/libsofthsm2.so", "/usr/lib64/libsofthsm2.so")


class SoftHsm:
    """A token with the label LABEL and the PIN PIN. A process finds it by `environment`.

    The test is skipped, or fails where CI=true, without SoftHSM or python-pkcs11.
    """

    def __init__(self, folder: Path) -> None:
        require_module("pkcs11")
        found = next(filter(Path.exists, map(Path, _MODULES)), None)
        self.module: Final = require(found, "SoftHSM (Debian: softhsm2)")
        tokens, config = folder / "tokens", folder / "softhsm2.conf"
        tokens.mkdir(parents=True)
        config.write_text(f"directories.tokendir = {tokens}\nobjectstore.backend = file\nlog.level = ERROR\n")
        self._library = {"SOFTHSM2_CONF": str(config)}
        self.add_token(LABEL)

    def add_token(self, label: str) -> None:
        """Make another token."""
        program = require(shutil.which("softhsm2-util"), "softhsm2-util (Debian: softhsm2)")
        words = ["--init-token", "--free", "--label", label, "--pin", PIN, "--so-pin", "0000-security-officer"]
        subprocess.run([program, *words], env=self._library, check=True, capture_output=True)

    @property
    def environment(self) -> dict[str, str]:
        """The settings of Penstock for this token, and the configuration of SoftHSM."""
        return {
            **self._library,
            "PENSTOCK_INFERENCE_PRIVACY_ENCRYPTION_KEY_SOURCE": "hsm",
            "PENSTOCK_INFERENCE_PRIVACY_PKCS11_MODULE": str(self.module),
            "PENSTOCK_INFERENCE_PRIVACY_PKCS11_TOKEN": LABEL,
            "PENSTOCK_PKCS11_PIN": PIN,
        }
