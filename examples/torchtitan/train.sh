#!/bin/sh
# Trains a small Llama with TorchTitan's stock trainer: FSDP2 on 4 CPU ranks.
#
#     examples/torchtitan/train.sh [OPTION...]
#
# Options go to the trainer: --backend gloo, --parallelism.tensor_parallel_degree 2, ...
set -e
cd "$(dirname "$0")"
assets=${TMPDIR:-/tmp}/tpu_dist_torchtitan
python assets.py "$assets"
OMP_NUM_THREADS=1 exec python -m torch.distributed.run --standalone --nproc-per-node=4 \
    -m torchtitan.train --module tpu_dist.titan --config llama3.llama3_debugmodel \
    --hf_assets_path "$assets" --dataloader.dataset_path "$assets/text" \
    --dump_folder "$assets/outputs" --training.steps 10 --training.seq_len 64 \
    --training.local_batch_size 2 --validator.no-enable --checkpoint.no-enable "$@"
