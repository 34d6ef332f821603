#!/bin/bash
mkdir -p /logs/verifier
if
  cd /app && python3 -c 'from total import total; assert [total(n) for n in (0, 1, 2, 10)] == [0, 1, 3, 55]'
then echo 1; else echo 0; fi > /logs/verifier/reward.txt
