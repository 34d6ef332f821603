#!/bin/bash
set -e
wc -l < words.txt > count.txt
