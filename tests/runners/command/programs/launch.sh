#!/bin/sh
# Starts a training as clusters' scripts do: sh launch.sh BATCH STEPS [PYTHON]
set -eu
echo "job starts on $(hostname)"
cd "$(dirname "$0")"
"${3:-python3}" two_optimizers.py --batch "$1" --steps "$2" 2>&1 | cat
echo "job done"
