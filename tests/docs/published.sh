# What readers of the published workshop and trainer type, with our folders in the place of the author's: a paragraph in
# a new shell each, in the top folder. Left out are commands without this project in them (pip, module, rocminfo, rocpd),
# and those of the workshop's other versions.

python tiny_llama_v3.py --batch-size 8 --seq-len 128 --num-steps 10

python tiny_llama_v3.py --batch-size 8 --seq-len 128 --num-steps 20

rocprof --stats python tiny_llama_v3.py --batch-size 8 --seq-len 128 --num-steps 10

rocprof --stats python tiny_llama_v3.py --batch-size 8 --seq-len 128 --num-steps 20

rocprofv2 --kernel-trace -o v3_trace.json python tiny_llama_v3.py --batch-size 8 --seq-len 128 --num-steps 5

python tiny_llama_v3.py --hidden-dim 512 --num-layers 8 --num-heads 8 --learning-rate 3e-4 --use-amp

python3 run_triton_profiling.py

python run_triton_profiling.py --only rmsnorm --hidden-dim 4096

chmod +x run_rocprof_triton.sh
./run_rocprof_triton.sh
ls rocprof_results/
cat rocprof_results/triton_analysis_summary.md

./get_trace.sh

./get_counters.sh

./get_rocprof_compute.sh

./get_rocprof_sys.sh

./get_hotspots.sh

cd exercises/performance_debugging
cat README.md
./run_all_stages.sh
sort -t',' -k4 -nr results/stage4_profile.csv | head -20
diff results/stage2_profile.csv results/stage5_profile.csv || [ $? = 1 ]

cd nanogpt_triton/data/shakespeare
python prepare.py

cd nanogpt_triton
python train.py --dataset=shakespeare --batch_size=12 --max_iters=100 --eval_interval=50 --compile=False

cd nanogpt_triton
torchrun --standalone --nproc_per_node=4 train.py --dataset=shakespeare --batch_size=12 --max_iters=100

cd nanogpt_triton
python train.py --compile=True --batch_size=12 --max_iters=100

cd nanogpt_triton
python train.py --device=cpu --batch_size=4 --max_iters=10 --compile=False

cd nanogpt_triton
nsys profile -o triton_profile python train.py --max_iters=10

cd nanogpt_triton
python -c "import torch; print(torch.cuda.is_available())"
python -c "import triton; print(f'Triton {triton.__version__} installed successfully')"
python -c "from kernels import TRITON_AVAILABLE; print(f'Triton available: {TRITON_AVAILABLE}')"
python -c "
import torch
from kernels import triton_layer_norm, TRITON_AVAILABLE
x, weight, bias = torch.randn(12, 8, 768), torch.randn(768), torch.randn(768)
torch.testing.assert_close(triton_layer_norm(x, weight, bias), torch.nn.functional.layer_norm(x, (768,), weight, bias))
"
