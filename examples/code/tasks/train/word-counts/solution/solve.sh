#!/bin/bash
set -e
python3 -c 'import collections, json; print(json.dumps(collections.Counter(open("poem.txt").read().split())))' > counts.json
