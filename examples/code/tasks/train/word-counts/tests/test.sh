#!/bin/bash
mkdir -p /logs/verifier
if
  python3 -c 'import json; assert json.load(open("/app/counts.json")) == dict(the=3, cat=1, saw=1, dog=2, **{"and": 1}, ran=1)'
then echo 1; else echo 0; fi > /logs/verifier/reward.txt
