#pragma once
// What the kernels of the gradients of grouped matrices share: out[g] = the sum over the rows r of group g of a[r]ᵀ · b[r]. Rows of a
// and of b may be gathered. Of groups without rows it is zero.
//
// The prelude declares GroupedWeightsParams. Define: ELEM, the type of all.

#include "warpsmith/grouped_tiles.cuh"

namespace warpsmith::grouped {

// A tile of the gradient of a group, from row m and column n on, and the group's rows [row, row + depth).
struct WeightTile {
  int group, m, n, row, depth;
};

// Number `at`: groups follow each other, and in a group rows of tiles.
template <int kTileM, int kTileN> WS_INLINE WeightTile weight_tile(const GroupedWeightsParams& p, u32 at) {
  const u32 columns = ((u32)p.n + kTileN - 1) / kTileN, tiles = columns * (((u32)p.m + kTileM - 1) / kTileM);
  const u32 number = at / tiles, inside = at - number * tiles, row = inside / columns;
  GroupWalk<1, 4, GroupedWeightsParams> walk(p);
  const Group group = walk.group((int)number);
  return {group.number, (int)row * kTileM, (int)(inside - row * columns) * kTileN, group.row, group.end - group.row};
}

// Which row of a and of b is that of a group.
WS_INLINE int row_of(const GroupedWeightsParams& p, const WeightTile& tile, int k, bool gathers) {
  const int row = tile.row + k;
  return gathers ? ((const i32*)p.order)[row] : row;
}

WS_INLINE ELEM* element_of(const GroupedWeightsParams& p, const WeightTile& tile, int m, int n) {
  return (ELEM*)p.out + (tile.group * p.out_group + m * p.out_row + n * p.out_col);
}

}  // namespace warpsmith::grouped
