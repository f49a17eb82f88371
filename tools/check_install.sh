#!/usr/bin/env bash
# Resolve the package with all its extras from a plain package index, for every supported Python on this machine.
#
#     tools/check_install.sh [python3.12 ...]       (`make check-install`)
#
# The script ignores pip's configuration files and environment variables that add other sources, so that a local wheel
# cannot hide a missing or conflicting version. pip resolves (--dry-run) against constraints.txt. Then the newest
# versions of the packages that the command line imports are installed into a temporary folder, without constraints, and
# the command line is started.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PIP_FIND_LINKS PIP_EXTRA_INDEX_URL PIP_INDEX_URL PIP_CONSTRAINT PIP_NO_INDEX
export PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1
extras=$(sed -n '/^\[project.optional-dependencies\]/,/^\[project.scripts\]/s/^\([a-z]*\) = .*/\1/p' pyproject.toml | paste -sd,)

# Default: for each supported version, the first interpreter on the PATH or in pyenv's folder.
pythons=("$@")
if [ ${#pythons[@]} -eq 0 ]; then
  for minor in 11 12 13 14; do
    for candidate in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.$minor.*/bin/python; do
      if "$candidate" -c "import sys; sys.exit(sys.version_info[:2] != (3, $minor))" 2>/dev/null; then
        pythons+=("$candidate")
        break
      fi
    done
  done
fi
[ ${#pythons[@]} -gt 0 ] || { echo "No Python from 3.11 to 3.14 found."; exit 2; }

failed=0
seen=
for python in "${pythons[@]}"; do
  version=$("$python" -c 'import platform; print(platform.python_version())')
  seen+=" ${version%.*}"
  log=$(mktemp)
  if "$python" -m pip install --quiet --dry-run --ignore-installed --constraint constraints.txt ".[$extras]" >"$log" 2>&1; then
    echo "Python $version: all extras ($extras) resolve"
  else
    echo "Python $version: FAILED"
    tail -20 "$log"
    failed=1
  fi
  rm -f "$log"
done
# For a version without an interpreter on this machine, uv can still resolve the packages.
uv=$(command -v .venv/bin/uv || command -v uv || true)
for minor in 11 12 13 14; do
  case " $seen " in *" 3.$minor "*) continue ;; esac
  if [ -z "$uv" ]; then
    echo "Python 3.$minor: no interpreter on this machine, not checked"
  elif UV_NO_CONFIG=1 "$uv" pip compile --quiet --python-version "3.$minor" --all-extras --only-binary :all: --no-binary pyspark \
    --constraint constraints.txt pyproject.toml >/dev/null; then
    echo "Python 3.$minor: all extras resolve (by uv, wheels except for pyspark; no interpreter on this machine)"
  else
    echo "Python 3.$minor: FAILED (by uv)"
    failed=1
  fi
done
# Without constraints pip takes the newest versions that pyproject.toml allows; the command line must start with them.
# PyTorch is not installed, because the command line imports it only when a command needs it.
python=${pythons[0]}
folder=$(mktemp -d)
mapfile -t needed < <(sed -n 's/^    "\(\(typer\|rich\|lazy-loader\|filelock\)[^"]*\)",.*/\1/p' pyproject.toml)
if "$python" -m venv "$folder" && "$folder/bin/pip" install --quiet "${needed[@]}" && "$folder/bin/pip" install --quiet --no-deps . \
  && (cd "$folder" && bin/unheard --version && bin/unheard train --help >help.txt); then
  echo "The command line starts with the newest allowed versions (${needed[*]})"
else
  echo "The command line does not start with the newest allowed versions (${needed[*]})"
  failed=1
fi
rm -rf "$folder"
exit $failed
