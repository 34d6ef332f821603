#!/bin/bash
mkdir -p /logs/verifier
if
  cd /app && python3 -c 'from even import is_even; assert [is_even(n) for n in (-2, -1, 0, 1, 10**20)] == [True, False, True, False, True]'
then echo 1; else echo 0; fi > /logs/verifier/reward.txt
