"""The gateway of the embedded stack: its port, and the end of one that answers no more."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import ExitStack

from penstock.compose.stack.gateway import HOST, HttpProbe, choose_port, is_answered
from penstock.compose.stack.supervisor import Program, Supervisor, SupervisorTimeouts
from tests.servers import free_port, wait_until

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Alive(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health/live" else 404)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[1])), Alive).serve_forever()
"""


def test_a_frozen_server_is_killed_and_started_again():
    """It lives and its port accepts connections, but nothing answers them."""
    port = free_port()
    probe = HttpProbe(port, every_s=0.1, timeout_s=1, most_failures=2)
    program = Program("gateway", [sys.executable, "-c", SERVER, str(port)], os.environ, probe=probe)
    supervisor = Supervisor([program], SupervisorTimeouts(first_delay_s=0.1))
    with ExitStack() as ends:
        ends.callback(supervisor.close)
        supervisor.start()
        wait_until(lambda: probe._process.has_answered, 20, "the probe has an answer")
        frozen = supervisor.pids()["gateway"]
        os.kill(frozen, signal.SIGSTOP)
        wait_until(lambda: supervisor.pids().get("gateway", frozen) != frozen, 60, "another process runs")
        wait_until(lambda: is_answered(port, 5), 20, "it answers")


def test_a_server_that_never_answers_is_killed_at_its_limit():
    """Failed questions count after the first answer only: a start takes as long as it is allowed to."""
    probe = HttpProbe(free_port(), every_s=1e-9, most_failures=1, start_s=120)
    reasons = []
    for now in range(100, 222):
        reasons.append(probe.kill_reason(1, float(now)))
        question = probe._process.question
        assert question is not None
        question.join()
    assert reasons[:-1] == [None] * 121
    assert reasons[-1] == "no answer within 120 s of its start"
    assert probe.kill_reason(2, 222.0) is None


def test_a_port_that_another_program_has_is_not_taken():
    """Then any free one is; and a port that is free is taken as it was asked for."""
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        taken = other.getsockname()[1]
        assert choose_port(taken) not in (0, taken)
    free = free_port()
    assert choose_port(free) == free
    assert choose_port(0) > 0
