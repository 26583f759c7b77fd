#!/usr/bin/env bash
# Installs a pre-commit hook that checks format and lints.
set -euo pipefail
cd "$(dirname "$0")/.."
hooks=$(git rev-parse --git-path hooks)
hook=$hooks/pre-commit
mkdir -p "$hooks"
if [ -e "$hook" ] && ! grep -q 'make --no-print-directory lint' "$hook"; then
    echo "hooks: $hook exists and is not ours; add \`make lint\` to it yourself" >&2
    exit 1
fi
cat >"$hook" <<'HOOK'
#!/usr/bin/env bash
set -euo pipefail
cd "$(git rev-parse --show-toplevel)"
exec make --no-print-directory lint
HOOK
chmod +x "$hook"
echo "hooks: installed $hook"
