#!/bin/bash
mkdir -p /logs/verifier
if
  [ "$(xargs < /app/sorted.txt)" = "-3 2 9 10 100" ]
then echo 1; else echo 0; fi > /logs/verifier/reward.txt
