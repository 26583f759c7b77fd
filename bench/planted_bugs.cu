// One bug for each tool of compute-sanitizer, chosen by name; `none` runs the same kernels without a bug.
#include <cstdio>
#include <cstring>

// memcheck: a thread writes past the end, far enough not to hit the allocation that follows.
__global__ void out_of_bounds(float* x, int n, bool bug) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = i;
    if (i == n && bug) x[i + (1 << 20)] = i;
}

// racecheck: a warp reads what another wrote to shared memory, without a barrier between.
__global__ void race(float* x, bool bug) {
    __shared__ float tile[128];
    tile[threadIdx.x] = threadIdx.x;
    if (!bug) __syncthreads();
    x[threadIdx.x] = tile[127 - threadIdx.x];
}

// initcheck: reads memory that nothing wrote.
__global__ void sum(const float* x, float* out) {
    atomicAdd(out, x[threadIdx.x]);
}

// synccheck: a barrier of the block that half of a warp never reaches.
__global__ void divergent(float* x, bool bug) {
    if (!bug || threadIdx.x % 32 < 16) __syncthreads();
    x[threadIdx.x] = threadIdx.x;
}

int main(int argc, char** argv) {
    const char* bug = argc > 1 ? argv[1] : "none";
    auto is = [&](const char* name) { return strcmp(bug, name) == 0; };
    const int n = 128;
    float *x = nullptr, *out = nullptr;
    if (cudaMalloc(&x, n * sizeof(float)) != cudaSuccess) return 1;
    if (cudaMalloc(&out, sizeof(float)) != cudaSuccess) return 1;
    if (cudaMemset(out, 0, sizeof(float)) != cudaSuccess) return 1;
    if (!is("initcheck") && cudaMemset(x, 0, n * sizeof(float)) != cudaSuccess) return 1;
    sum<<<1, n>>>(x, out);
    if (!is("initcheck")) {
        out_of_bounds<<<2, n>>>(x, n, is("memcheck"));
        race<<<1, n>>>(x, is("racecheck"));
        divergent<<<1, 64>>>(x, is("synccheck"));
    }
    cudaError_t error = cudaDeviceSynchronize();
    // Under a tool the planted bug may also end as a CUDA error; that is for the tool to report.
    if (error != cudaSuccess) printf("%s\n", cudaGetErrorString(error));
    return is("none") && error != cudaSuccess;
}
