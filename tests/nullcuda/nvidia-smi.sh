#!/bin/sh
# What dhp asks nvidia-smi for, of the devices of null CUDA.
case "$*" in *memory.total*) ;; *) exit 1 ;; esac
at=0
while [ "$at" -lt "${NULLCUDA_DEVICES:-1}" ]; do
  echo "$at, 580.65.06, Default, $((${NULLCUDA_BYTES:-150109880320} / 1048576)) MiB, 4 MiB"
  at=$((at + 1))
done
