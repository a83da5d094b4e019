#!/usr/bin/env bash
# Certify a running server: health, readiness, lost answers, replay, conflict, receipts, SSE resume, dependencies.
#   scripts/certify-memory-operations.sh                  the server of the default data directory, else port 23001
#   scripts/certify-memory-operations.sh --url URL        another one; or --data-dir DIR for the owner of a directory
#   scripts/certify-memory-operations.sh --long-memory    also kills its executor in the middle of a long memory
#   scripts/certify-memory-operations.sh --json           one JSON document
# Exit code 0: all lines are ok. 1: one failed, and says what to do. 5: no server answers. It starts no server.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
[ -x "$here/.venv/bin/muniment" ] || "$here/scripts/install" --no-dev >&2
exec "$here/.venv/bin/muniment" certify "$@"
