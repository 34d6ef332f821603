#!/bin/bash
set -e
printf 'def is_even(n):\n    return n %% 2 == 0\n' > even.py
