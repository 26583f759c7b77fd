#pragma once
// Tiles of rows that are sorted by group, where only the device knows how many rows each group has.
//
// A group's rows are cut into tiles of kRows rows, the last of which may have fewer; tiles are numbered group by group. Rows
// that belong to no group come last and count as one more group. So there are at most
//   rows / kRows + min(groups + 1, rows)
// tiles, whatever the counts are: a grid for all of them can be launched by a host that does not know the counts.

#include "warpsmith/reduce.cuh"

namespace warpsmith::grouped {

// A group with the rows [row, end), whose tiles start at number `tile`. `number` is that of the group, or how many there
// are for the rows that belong to none.
struct Group {
  int number, row, end, tile;
};

// Finds the groups of ascending tiles. The 32 lanes of a warp walk the counts together, kEach groups a lane at a time: more of them
// take fewer steps and more registers. `P` has the address `counts`, the distance `counts_step` between them, and the numbers
// `groups` and `rows`, which are below 2^30.
template <int kRows, int kEach, class P> struct GroupWalk {
  static constexpr int kAtOnce = 32 * kEach;

  const P& p;
  // The first of the groups at hand, and the rows and tiles before them.
  int first = 0, rows = 0, tiles = 0;
  // Of this lane's groups: rows and tiles before each, and after the last.
  int row[kEach + 1], tile[kEach + 1];

  WS_INLINE GroupWalk(const P& p) : p(p) { load(); }

  // The group of a tile, which must not come before that of the last call. Past the last tile it is one without rows from
  // `end` on: the caller compares.
  WS_INLINE Group find(int at) {
#pragma unroll 1
    while (true) {
      const u32 after = __ballot_sync(kAllLanes, at < tile[kEach]);
      if (after) return broadcast(at, __ffs((int)after) - 1);
      rows = __shfl_sync(kAllLanes, row[kEach], 31);
      tiles = __shfl_sync(kAllLanes, tile[kEach], 31);
      if (first + kAtOnce >= p.groups) return {p.groups, rows, p.rows, tiles};
      first += kAtOnce;
      load();
    }
  }

  // The group of this number, which must not come before that of the last call.
  WS_INLINE Group group(int number) {
#pragma unroll 1
    while (number >= first + kAtOnce) {
      rows = __shfl_sync(kAllLanes, row[kEach], 31);
      tiles = __shfl_sync(kAllLanes, tile[kEach], 31);
      first += kAtOnce;
      load();
    }
    Group found = {number, row[0], row[1], tile[0]};
#pragma unroll
    for (int i = 1; i < kEach; ++i)
      if ((number - first) % kEach == i) found = {number, row[i], row[i + 1], tile[i]};
    return from_lane(found, (number - first) / kEach);
  }

 private:
  // Counts below zero are zero; rows past the last are absent. Sums stop at `rows`, so they cannot overflow.
  WS_INLINE void load() {
    const int lane = threadIdx.x % 32;
    int counts[kEach], own = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int group = first + lane * kEach + i;
      counts[i] = group < p.groups ? min(max(((const i32*)p.counts)[group * p.counts_step], 0), p.rows) : 0;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) own = min(own + counts[i], p.rows);
    row[0] = min(rows + before(own, lane), p.rows);
    int own_tiles = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      row[i + 1] = min(row[i] + counts[i], p.rows);
      own_tiles += (row[i + 1] - row[i] + kRows - 1) / kRows;
    }
    tile[0] = tiles + warp_scan<Sum>(own_tiles, lane) - own_tiles;
#pragma unroll
    for (int i = 0; i < kEach; ++i) tile[i + 1] = tile[i] + (row[i + 1] - row[i] + kRows - 1) / kRows;
  }
  // The sum of what the lanes before this one have.
  WS_INLINE int before(int own, int lane) const {
    int sum = own;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(kAllLanes, sum, offset);
      if (lane >= offset) sum = min(sum + other, p.rows);
    }
    const int other = __shfl_up_sync(kAllLanes, sum, 1);
    return lane > 0 ? other : 0;
  }
  // The group of a tile that is one of lane `source`'s.
  WS_INLINE Group broadcast(int at, int source) const {
    Group group = {first + (int)(threadIdx.x % 32) * kEach, row[0], row[1], tile[0]};
#pragma unroll
    for (int i = 1; i < kEach; ++i)
      if (at >= tile[i]) group = {first + (int)(threadIdx.x % 32) * kEach + i, row[i], row[i + 1], tile[i]};
    return from_lane(group, source);
  }
  static WS_INLINE Group from_lane(Group group, int source) {
    group.number = __shfl_sync(kAllLanes, group.number, source);
    group.row = __shfl_sync(kAllLanes, group.row, source);
    group.end = __shfl_sync(kAllLanes, group.end, source);
    group.tile = __shfl_sync(kAllLanes, group.tile, source);
    return group;
  }
};

// A tile of the result of a grouped product, with the rows [row, end) of its group; `column` counts tiles of columns.
struct GroupTile {
  int group, row, end, column;
};

// Tile number `at`. Tiles that run at the same time should share rows of x and of w: those of a group are in bands of up to kBand
// tiles of rows, and in a band column by column. `columns` is how many tiles lie side by side.
template <int kRows, class Walk> WS_INLINE GroupTile group_tile(Walk& walk, u32 at, u32 columns) {
  constexpr u32 kBand = 16;
  const Group group = walk.find((int)(at / columns));
  const u32 tiles = (u32)(group.end - group.row + kRows - 1) / kRows;
  const u32 inside = at - (u32)group.tile * columns, band = inside / (kBand * columns), first = band * kBand;
  // Past the last tile there is no band.
  const u32 height = min(max(tiles, first + 1) - first, kBand), left = inside - first * columns, column = left / height;
  const i64 row = group.row + (i64)(first + left - column * height) * kRows, end = group.end;
  return {group.number, (int)min(row, end), (int)min(row + kRows, end), (int)column};
}

}  // namespace warpsmith::grouped
