#!/bin/bash
set -e
for f in notes/*.text; do mv "$f" "${f%.text}.txt"; done
