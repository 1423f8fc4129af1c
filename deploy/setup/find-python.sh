#!/bin/sh
# Prints the path of a Python from 3.11 to 3.14, preferring $PYTHON, then the newest tested. Exit 2 with one line if none.
# Each candidate is run, because a name on the PATH may be a shim that leads nowhere.
best=""
seen=""
for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14 python}; do
    found=$("$name" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
    seen="${seen:+$seen, }$name is $found"
    case $found in
        3.11 | 3.12 | 3.13 | 3.14)
            best=$name
            break
            ;;
    esac
done
if [ -n "$best" ]; then
    "$best" -c 'import sys; print(sys.executable)'
    exit 0
fi
case $(uname -s) in
    Darwin) mend="brew install python@3.13" ;;
    *) mend="sudo apt-get install python3.11 python3.11-venv (or your system's package of Python 3.11 to 3.14)" ;;
esac
echo "python: found ${seen:-none}${PYTHON:+ (PYTHON=$PYTHON)}; needed 3.11 to 3.14; mend: $mend" >&2
exit 2
