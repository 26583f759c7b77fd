// Copies matrices whose lines the copy engine cannot load, because they start anywhere or are not dense, to dense lines that
// start at multiples of 16 bytes. The last piece of a line is filled with zeros.
//
// Threads to data: a warp has ITEMS units of 32 pieces of 16 bytes, a lane a piece of each. Units are counted through the
// whole matrix, so that short lines keep as many loads in flight as long ones, and those of a block are neighbours.
// - DENSE: a unit is a segment of a line. Lanes read aligned pieces and exchange what belongs to their neighbours:
//   dense.cuh.
// - Otherwise elements lie `step` apart, and a unit is the same piece of 32 lines: where lines are neighbours in memory,
//   lanes read what lies side by side.
//
// Defines: SIZE, bytes of an element, 1, 2 or 4; DENSE, for 2 or 4; ITEMS.

#include "warpsmith/dense.cuh"
#include "warpsmith/division.cuh"

using namespace warpsmith;

template <int kSize> struct ElementOf { typedef u32 Type; };
template <> struct ElementOf<1> { typedef u8 Type; };
template <> struct ElementOf<2> { typedef u16 Type; };
typedef ElementOf<SIZE>::Type Element;

constexpr int kThreads = 256, kWarps = kThreads / 32, kPiece = kVec<Element>;

// A lane's piece of a unit; nothing is `left` of a line that does not exist.
struct Piece {
  Chunk<Element> values;
  u32 edge;
  const Element* from;  // with DENSE that of the first lane
  Element* to;
  int left;  // elements from `from` to the end of the line

  WS_INLINE Piece() {}

  WS_INLINE void load(const AlignedMatrix& m, u32 unit, u64 policy) {
    const bool exists = unit < m.units;
    if (!exists) unit = m.units - 1;
    const u32 group = divide(unit, m.per_line), batch = divide(group, m.groups), lane = threadIdx.x % 32;
    const u32 place = unit - group * m.per_line.value, in_batch = group - batch * m.groups.value;
    const u32 line = DENSE ? in_batch : in_batch * 32 + lane;
    const int at = (int)place * (DENSE ? 32 * kPiece : kPiece);
    left = exists && line < (u32)m.lines ? m.length - at : 0;
    from = (const Element*)m.from + (batch * m.batch_stride + line * m.line_stride + at * m.step);
    to = (Element*)m.to + ((batch * (i64)m.lines + line) * m.pitch + at + (DENSE ? lane * kPiece : 0));
#if DENSE
    Segment<Element, 32>(from, left).fetch(values, edge, policy);
#else
    load_chunk<kAny>(values, from, 0, m.step, left, Element(0));
#endif
  }

  WS_INLINE void store() {
    int here = left;
#if DENSE
    // All lanes take part in the exchange, also past the last unit.
    Segment<Element, 32>(from, left).arrange(values, edge);
    here -= (int)(threadIdx.x % 32) * kPiece;
#endif
    if (here > 0) store_words(to, values.words);
  }
};

// The matrix that a block copies. They are few, and their blocks follow each other.
WS_INLINE const AlignedMatrix& matrix_of(const AlignParams& p, u32 block) {
  int at = 0;
#pragma unroll
  for (int i = 1; i < (int)(sizeof(p.matrices) / sizeof(p.matrices[0])); ++i)
    if (block >= p.matrices[i].first_block) at = i;
  return p.matrices[at];
}

extern "C" __global__ void __launch_bounds__(kThreads) linear_align(const __grid_constant__ AlignParams p) {
  begin_kernel();
  const AlignedMatrix& m = matrix_of(p, blockIdx.x);
  const u32 first = (blockIdx.x - m.first_block) * (kWarps * ITEMS) + threadIdx.x / 32;
  const u64 policy = load_policy(false);
  Piece pieces[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) pieces[i].load(m, first + i * kWarps, policy);
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) pieces[i].store();
}
