#!/bin/bash
set -e
sort -n numbers.txt > sorted.txt
