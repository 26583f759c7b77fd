#pragma once
// out = softmax(scale q k^T + mask) v on Hopper. Scores never leave the registers.
//
// Threads to data: persistent and warp-specialised. Warpgroup 0 is the producer (attention_producer.cuh): it has the copy
// engine bring tiles of q and blocks of BLOCK_N keys and values into rings in shared memory. Each of the CONSUMERS other
// warpgroups owns 64 queries of a tile: it multiplies them by a block of keys (q from shared memory), turns the scores
// into weights in its registers (attention_weights.cuh), and multiplies these, still in registers, by the values. While
// the weights of block n are computed, the tensor cores work on the values of block n - 1; and the warpgroups take turns
// in issuing products, so that the exponentials of one overlap with the products of another. Warp w and lane l of a
// warpgroup hold rows 16 w + l / 4 + 8 h of scores, weights and sums (wgmma.cuh).
//
// A row goes through its keys in ascending blocks that begin at multiples of BLOCK_N; blocks of which it sees nothing do
// not change its bits. In bf16, BLOCK_N does not change them either (attention_weights.cuh), and the host chooses it for
// the call; in f16 it depends only on the head and the options. So the bits of a row do not depend on the number of
// queries, their tile or the batch.
//
// Defines: PAGED, whether keys and values lie in pages of PAGE_SIZE tokens, in the order of a table; T, bf16 or f16;
// HEAD_DIM; BLOCK_N; CONSUMERS, 2 or 3; STAGES of keys and values; Q_STAGES of queries; CAUSAL; WINDOW, whether old keys
// are hidden; SOFTCAP; HAS_SINKS; HAS_LSE; VARLEN, whether requests of different lengths are packed one after the other,
// as they always are with pages; OUT_WHOLE, whether shared memory holds all results of a tile, which the copy engine then
// stores, or only 64 columns at a time.

#include "warpsmith/attention_producer.cuh"
#include "warpsmith/attention_weights.cuh"
#include "warpsmith/mma.cuh"
#include "warpsmith/vec.cuh"
#include "warpsmith/wgmma.cuh"

namespace warpsmith::attention {

WS_INLINE float* lse_at(const AttentionParams& p, int batch, int head, int query) {
  return (float*)p.lse + (batch * p.lse_at.batch + head * p.lse_at.head + query * p.lse_at.query);
}
WS_INLINE T* out_at(const AttentionParams& p, int batch, int head, int query) {
  return head_at<T>(p.out, p.out_at, batch, query, head);
}
WS_INLINE float sink_of(const AttentionParams& p, int head) { return ((const float*)p.sinks)[head * p.sinks_step]; }

// The results of tiles that see no keys at all. Executed by one warp.
WS_INLINE void store_empty(const Sm90Params& p) {
  const int lane = threadIdx.x % 32;
  for (TileScheduler tiles; !tiles.done(p); tiles.advance()) {
    Tile tile;
    if (!tiles.get(p, tile) || tile.block < tile.end) continue;
    const Request& r = tile.request;
    const int end = r.first_query + min(r.q_len, tile.first_query + kBlockM);
#pragma unroll 1
    for (int query = r.first_query + tile.first_query; query < end; ++query) {
      const u32 zero[4] = {0, 0, 0, 0};
      if (lane < HEAD_DIM / 8) store_words(out_at(p.attention, r.batch, tile.head, query) + lane * 8, zero);
      if (HAS_LSE && lane == 0)
        *lse_at(p.attention, r.batch, tile.head, query) = HAS_SINKS ? sink_of(p.attention, tile.head) : minus_infinity();
    }
  }
}

struct Consumer {
  const Sm90Params& p;
  u32 shared, index, warp, lane;
  u64 first_q, first_k, first_v;  // descriptors of the first stages
  Ring<Q_STAGES> q_ring;
  Ring<STAGES> k_ring, v_ring;

  u32 absent = 0;  // pages of the block of the scores that do not exist

  float scores[BLOCK_N / 2], out[HEAD_DIM / 2];
  u32 weights[BLOCK_N / 4];

  WS_INLINE Consumer(const Sm90Params& p, u32 shared, u32 index)
      : p(p), shared(shared), index(index), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32),
        first_q(wgmma_descriptor<false>(shared + kQAt + index * (64 * 128))), first_k(wgmma_descriptor<false>(shared + kKAt)),
        first_v(wgmma_descriptor<true, BLOCK_N>(shared + kVAt)),
        q_ring(shared + kBarriersAt), k_ring(shared + kKBarriers), v_ring(shared + kVBarriers) {}

  WS_INLINE void await_turn() const { named_barrier_sync(kTurnBarrier + index, 256); }
  WS_INLINE void end_turn() const { named_barrier_arrive(kTurnBarrier + (index + 1 == CONSUMERS ? 0 : index + 1), 256); }

  // A descriptor of what lies `units` of 16 bytes further on. Only the lower half of a descriptor changes.
  static WS_INLINE u64 later(u64 descriptor, u32 units) {
    return (descriptor >> 32 << 32) | (u32)((u32)descriptor + units);
  }
  // Begins scores = q k^T for the block at the head of the ring.
  WS_INLINE void multiply_keys() {
    const u64 q = later(first_q, q_ring.stage * (kQBytes >> 4));
    const u64 k = later(first_k, k_ring.stage * (kBlockBytes >> 4));
    pin(scores);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step)
      Wgmma<T, T, BLOCK_N>::template mma<false, false>(scores, q + (step / 4 * (kQChunk >> 4) + step % 4 * kKMajorStep),
                                                       k + (step / 4 * (kChunk >> 4) + step % 4 * kKMajorStep), step > 0);
    wgmma_commit();
  }
  // Begins out += weights v.
  WS_INLINE void multiply_values(bool accumulate) {
    const u64 v = later(first_v, v_ring.stage * (kBlockBytes >> 4));
    pin(out);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; ++step)
      WgmmaA<T, HEAD_DIM>::template mma<true>(out, weights + 4 * step, v + step * kMNMajorStep, accumulate || step > 0);
    wgmma_commit();
  }

  // Hides the keys that rows do not see.
  WS_INLINE void mask(const Tile& tile, int n) {
    const int thread = thread_now(), kv_len = tile.request.kv_len, column = n * BLOCK_N + thread % 4 * 2;
    const int row = tile.first_query + thread / 32 * 16 - 64 + thread % 32 / 4 + tile.offset();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int end = (CAUSAL ? min(row + 8 * h + 1, kv_len) : kv_len) - column;
      const int begin = row + 8 * h - p.attention.window - column;
#pragma unroll
      for (int j = 0; j < BLOCK_N / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (8 * j + c >= end || (WINDOW && 8 * j + c < begin)) scores[4 * j + 2 * h + c] = minus_infinity();
    }
  }
#if PAGED
  WS_INLINE void hide_absent() {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i)
      if (absent >> (i / 4 * 8 / kPageRows) & 1) scores[i] = minus_infinity();
  }
#endif
  // Whether some row of this warpgroup does not see all of block n.
  WS_INLINE bool needs_mask(const Tile& tile, int n) const {
    const int row = tile.first_query + index * 64 + tile.offset(), kv_len = tile.request.kv_len;
    if ((n + 1) * BLOCK_N > (CAUSAL ? min(row + 1, kv_len) : kv_len)) return true;
    return WINDOW && n * BLOCK_N < row + 63 - p.attention.window;
  }

  // cap tanh(x / cap), with the scale of the scores in softcap_in.
  WS_INLINE void cap() {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) {
      // tanh(y) = 1 - 2 / (1 + e^2y)
      const float e = exp2_flushed(scores[i] * p.softcap_in);
      scores[i] = fmaf(-2.0f, reciprocal(1.0f + e), 1.0f);
    }
  }

  WS_INLINE void pack_weights() {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; ++i) {
      const float pair[2] = {scores[2 * i], scores[2 * i + 1]};
      weights[i] = pack_pair(pair, T{});
    }
  }

  // Caps the scores of block n and hides those of keys that rows do not see.
  WS_INLINE void complete_scores(const Tile& tile, int n) {
    if (SOFTCAP) cap();
    if (needs_mask(tile, n)) mask(tile, n);
#if PAGED
    if (absent) hide_absent();
#endif
  }
  // Computes the scores of block n again, each warp for itself. The keys are copied from global memory, because their place
  // in shared memory may have been reused, to where the warp's results will be, 16 at a time. The steps are the same, and
  // so are the bits.
  WS_INLINE void multiply_again(const Tile& tile, int n) {
    const u32 thread = thread_now(), lane = thread % 32, first_row = thread / 32 * 16 - 64;
    const u32 q = shared + kQAt + q_ring.stage * kQBytes, row = first_row + lane % 16;
    const u32 keys = shared + kOutAt + first_row / 16 * (kSlices * kSliceBytes);
    const KeysInMemory from(p, tile);
    if (kCopied) tma_store_wait_read<0>();
    // With explicit instructions: otherwise the compiler starts the sums in other registers, and there are too few.
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "+f"(scores[i]));
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int j = 0; j < BLOCK_N / 8; j += 2) {
        __syncwarp();
#pragma unroll 1
        for (u32 i = lane / 8; i < 16; i += 4) {
          const T* key = from.at(n * BLOCK_N + j * 8 + i);
          const u32 column = chunk * 64 + lane % 8 * 8;
          copy_async(keys + swizzled<128>(i * 128 + lane % 8 * 16), key + column, key && column < HEAD_DIM);
        }
        commit_copies();
        wait_copies<0>();
        __syncwarp();
#pragma unroll 1
        for (int step = 0; step < min(4, HEAD_DIM / 16 - chunk * 4); ++step) {
          u32 a[4], b[4];
          load_matrices<false>(a, q + chunk * kQChunk + swizzled<128>(row * 128 + step * 32 + lane / 16 * 16));
          load_matrices<false>(b, keys + swizzled<128>((lane / 16 * 8 + lane % 8) * 128 + step * 32 + lane / 8 % 2 * 16));
          multiply((float(&)[4])scores[4 * j], a, b[0], b[1], T{});
          multiply((float(&)[4])scores[4 * j + 4], a, b[2], b[3], T{});
        }
      }
    }
    __syncwarp();
  }

  // As Rows::weigh.
  template <bool kFirst> WS_INLINE void weigh(Rows& rows, float (&factor)[2], const Tile& tile, int n) {
    pin(scores);
    complete_scores(tile, n);
    const auto again = [&] {
      multiply_again(tile, n);
      complete_scores(tile, n);
    };
    rows.weigh<kFirst>(scores, factor, p.scale_log2, shared, again);
  }

  // The next tile that the producer has chosen; false when there is none.
  WS_INLINE bool next(Tile& tile) {
    mbarrier_wait(q_ring.full(), q_ring.parity);
    tile.take(p.attention, shared + kTileAt + q_ring.stage * kTileBytes);
    return tile.end > 0;
  }

  // One product with keys runs ahead of the values, also across the end of a tile: the tensor cores have work while the
  // first weights of the next tile are computed.
  WS_INLINE void run() {
    Tile tile;
    if (!next(tile)) return;
    Rows rows;
    float factor[2];
    mbarrier_wait(k_ring.full(), k_ring.parity);
    await_turn();
    multiply_keys();
    end_turn();
    wgmma_wait<0>();
    release_keys();
    weigh<true>(rows, factor, tile, tile.block);
    pack_weights();
    while (true) {
      const bool misses = misses_last(tile, index);
      const int end = misses ? tile.end - 1 : tile.end;
      // The keys of block n, and the values of the block before it.
#pragma unroll 1
      for (int n = tile.block + 1; n < end; ++n) {
        mbarrier_wait(k_ring.full(), k_ring.parity);
        await_turn();
        multiply_keys();
        mbarrier_wait(v_ring.full(), v_ring.parity);
        multiply_values(n > tile.block + 1);
        end_turn();
        wgmma_wait<1>();
        release_keys();
        weigh<false>(rows, factor, tile, n);
        finish_values();
        // Outside of `weigh`: all warps of a warpgroup must wait for the products together, but not all may be raised.
        if (rows.raised) {
#pragma unroll
          for (int i = 0; i < HEAD_DIM / 2; ++i) out[i] *= factor[i / 2 % 2];
        }
        pack_weights();
      }
      if (misses) {
        mbarrier_wait(k_ring.full(), k_ring.parity);
        await_turn();
        end_turn();
        release_keys();
      }
      const bool accumulate = end - tile.block > 1;
      release(q_ring.empty());
      q_ring.next();
      const Results done = results_of(tile);
      rows.end(shared);
      const Rows ended = rows;
      if (!next(tile)) {
        mbarrier_wait(v_ring.full(), v_ring.parity);
        multiply_values(accumulate);
        finish_values();
        finish(done, ended);
        // Shared memory must outlive the copies from it.
        if (kCopied) tma_store_wait_read<0>();
        return;
      }
      mbarrier_wait(k_ring.full(), k_ring.parity);
      await_turn();
      multiply_keys();
      mbarrier_wait(v_ring.full(), v_ring.parity);
      multiply_values(accumulate);
      end_turn();
      wgmma_wait<1>();
      release_keys();
      weigh<true>(rows, factor, tile, tile.block);
      finish_values();
      if (misses) {
        mbarrier_wait(v_ring.full(), v_ring.parity);
        release_values();
      }
      pack_weights();
      finish(done, ended);
    }
  }

  WS_INLINE void release_keys() {
    if (PAGED) absent = take_word(shared + kAbsentAt + k_ring.stage * 4);
    release(k_ring.empty());
    k_ring.next();
  }
  WS_INLINE void release_values() {
    release(v_ring.empty());
    v_ring.next();
  }
  WS_INLINE void finish_values() {
    wgmma_wait<0>();
    pin(out);
    release_values();
  }

  // Where the results of a warp go.
  struct Results {
    int batch, head, first;  // query of all in the tensor
    int rows;                // of the request, from there on
  };

  WS_INLINE Results results_of(const Tile& tile) const {
    const Request& r = tile.request;
    const int first = tile.first_query + index * 64 + warp * 16;
    return {r.batch, tile.head, r.first_query + first, r.q_len - first};
  }

  // Writes the results of a tile, through shared memory.
  WS_INLINE void finish(const Results& results, const Rows& rows) const {
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = quad_reduce<Sum>(rows.sum[h]);
      // The base of a row that saw nothing must not count beside a sink.
      float top = sum == 0.0f ? minus_infinity() : rows.top[h], share = 1.0f;
      if (HAS_SINKS) {
        // The sink joins last: relative to a sink far below the scores, weights would lose digits.
        const float sink = sink_of(p.attention, results.head) * kLog2E, most = fmaxf(top, sink);
        share = top == most ? 1.0f : exp2_flushed(top - most);
        sum = fmaf(sum, share, sink == most ? 1.0f : exp2_flushed(sink - most));
        top = most;
      }
      inverse[h] = sum == 0.0f ? 0.0f : share * reciprocal(sum);
      const int row = lane / 4 + 8 * h;
      if (HAS_LSE && lane % 4 == 0 && row < results.rows)
        *lse_at(p.attention, results.batch, results.head, results.first + row) =
            sum == 0.0f ? minus_infinity() : (top + log2f(sum)) * 0.6931471805599453f;
    }
    if (kCopied) {
      tma_store_wait_read<0>();
      __syncwarp();
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      stage(chunk, inverse);
      if (!kCopied) copy(chunk, results);
    }
    if (!kCopied) return;
    // In packed tensors, the rows after the last one of a request belong to another. A vote, so that the compiler knows
    // that lanes agree.
    const bool whole = !VARLEN || __all_sync(kAllLanes, results.rows >= 16);
    if (!whole) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) copy(chunk, results);
    }
    async_proxy_fence();
    __syncwarp();
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
      tma_store_if(whole, &p.out_map, slice(chunk), chunk * 64, results.first, results.head, results.batch);
    tma_store_commit();
  }
  WS_INLINE u32 slice(int chunk) const {
    return shared + kOutAt + (index * 4 + warp) * (kSlices * kSliceBytes) + (OUT_WHOLE ? chunk * kSliceBytes : 0);
  }
  WS_INLINE void stage(int chunk, const float (&inverse)[2]) const {
    // Read again: packed requests leave no register to keep it in.
    const u32 lane = VARLEN ? thread_now() % 32 : this->lane;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      if (chunk * 64 + j * 8 >= HEAD_DIM) break;
      u32 m[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (chunk * 8 + j + i / 2) + 2 * (i % 2);
        const float pair[2] = {out[at] * inverse[i % 2], out[at + 1] * inverse[i % 2]};
        m[i] = pack_pair(pair, T{});
      }
      store_matrices<false>(slice(chunk) + swizzled<128>(lane % 16 * 128 + (j + lane / 16) * 16), m[0], m[1], m[2], m[3]);
    }
    __syncwarp();
  }
  WS_INLINE void copy(int chunk, const Results& results) const {
    T* out = out_at(p.attention, results.batch, results.head, results.first);
    const u32 lane = thread_now() % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + lane / 8, column = lane % 8, at = chunk * 64 + column * 8;
      u32 words[4];
      load_shared(words, slice(chunk) + swizzled<128>(row * 128 + column * 16));
      if (row < results.rows && at < HEAD_DIM) store_words(out + (row * p.attention.out_at.token + at), words);
    }
    __syncwarp();
  }
};

WS_INLINE void consume(const Sm90Params& p, u32 shared, u32 index) {
  Consumer consumer(p, shared, index);
  // The first turn is the first warpgroup's.
  if (index == CONSUMERS - 1) consumer.end_turn();
  consumer.run();
  // Somebody waits for each arrival: none is pending when the block ends.
  if (index == 0) consumer.await_turn();
}

extern __shared__ __align__(1024) u8 shared_memory[];

// A kernel calls prepare, begin_kernel and attend. The parameters must be those of the kernel itself, because the copy
// engine reads its maps there. `prepare` touches no memory that another kernel could write.
WS_INLINE void prepare(const Sm90Params& p) {
  if (threadIdx.x == 0) {
    const u32 shared = shared_address(shared_memory);
    init_barriers(shared);
    tma_prefetch_map(&p.q_map);
    tma_prefetch_map(&p.k_map);
    tma_prefetch_map(&p.v_map);
    if (kCopied) tma_prefetch_map(&p.out_map);
  }
  if (threadIdx.x / 32 == 3) prefetch_first_tile(p);
  __syncthreads();
}
WS_INLINE void attend(const Sm90Params& p) {
  const u32 shared = shared_address(shared_memory);
  // A shuffle, so that the compiler knows that all lanes of a warp agree.
  const u32 warpgroup = __shfl_sync(kAllLanes, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    produce(p, shared);
    if (threadIdx.x / 32 == 3) store_empty(p);
  } else {
    take_registers<kConsumerRegisters>();
    consume(p, shared, warpgroup - 1);
  }
}

}  // namespace warpsmith::attention
