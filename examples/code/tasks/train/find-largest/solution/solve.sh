#!/bin/bash
set -e
ls -S logs | head -1 > largest.txt
