#!/bin/bash
set -e
sed -i 's/{nam}/{name}/' greet.py
