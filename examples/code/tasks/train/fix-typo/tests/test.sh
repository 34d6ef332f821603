#!/bin/bash
mkdir -p /logs/verifier
if
  [ "$(python3 /app/greet.py)" = "Hello, Ada!" ]
then echo 1; else echo 0; fi > /logs/verifier/reward.txt
