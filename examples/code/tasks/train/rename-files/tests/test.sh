#!/bin/bash
mkdir -p /logs/verifier
if
  [ "$(ls /app/notes | xargs)" = "one.txt three.md two.txt" ]
then echo 1; else echo 0; fi > /logs/verifier/reward.txt
