//! The kernels around the columns.

use super::super::variant::Rows;
use super::{Value, Writer, memory_type, register_type};
use crate::error::Result;
use crate::graph::NodeId;
use crate::op::Reduce;
use crate::plan::{Class, Kind};
use std::collections::HashSet;

impl Writer<'_> {
    fn lines(&mut self, indent: usize, lines: &[&str]) {
        lines.iter().for_each(|text| self.line(indent, text));
    }

    fn head(&mut self, name: &str, threads: &str) {
        let parameter = "const __grid_constant__ FuseParams p";
        self.line(
            0,
            &format!("extern \"C\" __global__ void __launch_bounds__({threads}) {name}({parameter}) {{"),
        );
    }

    pub(super) fn write_elements(&mut self, name: &str) -> Result<()> {
        self.head(name, "256");
        self.lines(
            2,
            &[
                "begin_kernel();",
                "[[maybe_unused]] constexpr bool exists = true;",
                "const Index columns = columns_of(p), in_row = (columns + (LANES * WIDTH - 1)) / (LANES * WIDTH);",
                "const Index units = (Index)p.num_rows * in_row * LANES, all = (Index)gridDim.x * 256;",
                "for (Index unit = (Index)blockIdx.x * 256 + threadIdx.x; unit < units; unit += all) {",
                "  [[maybe_unused]] const int lane = unit % LANES;",
                "  const Index tile = unit / LANES, row = RANK == 0 ? 0 : tile / in_row;",
                "  const Index column = (tile - row * in_row) * (LANES * WIDTH) + lane * (LANES == 1 ? WIDTH : 1);",
                "  const int count = count_of(column, columns);",
            ],
        );
        self.row_values(0)?;
        let needed = self.needs(0);
        self.declare(4, &needed, "");
        self.loads(4, &needed, "");
        self.chunk(4, 0, &needed)?;
        self.line(0, "  }\n}");
        Ok(())
    }

    pub(super) fn write_rows(&mut self, name: &str) -> Result<()> {
        let columns = self.kind == Kind::Columns;
        self.head(name, "LANES * ROWS");
        self.line(2, "const int lane = threadIdx.x % LANES;");
        let whole = (0..self.phases).any(|phase| self.reductions(phase).iter().any(|one| one.whole));
        let reduces = self.phases > 1;
        if reduces {
            self.line(2, "__shared__ float scratch[2][LANES > 32 ? LANES / 32 : 1];");
        }
        if whole {
            self.line(2, "__shared__ i64 scratch_whole[2][LANES > 32 ? LANES / 32 : 1];");
        }
        self.lines(2, &["begin_kernel();", "const Index columns = columns_of(p);"]);
        if columns {
            self.begin_sums();
        } else {
            self.lines(
                2,
                &[
                    "constexpr Index first_column = 0;",
                    "const Index num_rows = (Index)p.num_rows, all = gridDim.x * ROWS;",
                    "for (Index first = blockIdx.x * ROWS; first < num_rows; first += all) {",
                    "  const Index own = first + threadIdx.x / LANES;",
                    "  const bool exists = own < num_rows;",
                    // Threads of a warp stay together: the last row is computed again, and not stored.
                    "  const Index row = exists ? own : num_rows - 1;",
                ],
            );
        }
        if self.rows == Rows::Kept {
            self.load_all();
        }
        for phase in 0..self.phases {
            self.phase(phase)?;
        }
        if reduces {
            self.line(4, "if (LANES > 32) __syncthreads();");
        }
        self.line(2, "}");
        if columns && self.rows == Rows::Kept {
            self.end_sums();
        }
        self.line(0, "}");
        Ok(())
    }

    /// All loads of a row, ahead of everything that waits for one of them; and room for what is kept.
    fn load_all(&mut self) {
        let all = self.all_needs();
        // Indices of gathers are among the values of rows, which come with the first phase.
        let gathers = self.shape.gathers();
        self.declare(4, &all, "[ITEMS]");
        if !gathers {
            self.load_loop(&all);
        }
        let mut kept: Vec<NodeId> = self.kept.iter().copied().collect();
        kept.sort_unstable();
        for id in kept {
            let held = register_type(self.graph.node(id).dtype);
            self.line(4, &format!("{held} kept{}[ITEMS][WIDTH];", id.index()));
        }
    }

    fn load_loop(&mut self, wanted: &HashSet<Value>) {
        self.unroll();
        self.line(4, "for (int i = 0; i < ITEMS; ++i) {");
        self.columns_of_item();
        self.loads(6, wanted, "[i]");
        self.line(4, "}");
    }

    fn columns_of_item(&mut self) {
        self.lines(
            6,
            &[
                "const Index column = column_of(first_column, i, lane);",
                "[[maybe_unused]] const int count = count_of(column, columns);",
            ],
        );
    }

    /// What is between two reductions.
    fn phase(&mut self, phase: usize) -> Result<()> {
        self.row_values(phase)?;
        if phase == 0 && self.rows == Rows::Kept && self.shape.gathers() {
            self.load_loop(&self.all_needs());
        }
        let needed = self.needs(phase);
        let reductions = self.reductions(phase);
        for reduction in &reductions {
            let (c_type, start, _) = reduction.code();
            self.line(4, &format!("{c_type} part{} = {start};", reduction.id.index()));
        }
        // Reductions of what rows have one of have no elements, but count columns.
        let alone = reductions.iter().any(|one| self.class(one.arg) != Class::Full);
        if !needed.is_empty() || alone || !self.stores(phase).is_empty() || !self.sums(phase).is_empty() {
            self.columns(phase, &needed)?;
        }
        for reduction in &reductions {
            let (held, _, join) = reduction.code();
            let scratch = if reduction.whole { "scratch_whole" } else { "scratch" };
            let at = reduction.id.index();
            let over = format!("over_row<{join}>(part{at}, {scratch}[{}])", self.barrier % 2);
            self.barrier += 1;
            let text = match reduction.f {
                Reduce::Mean => format!("{over} / (float)columns"),
                _ => over,
            };
            self.line(4, &format!("const {held} {} = {text};", Value::here(reduction.id).name()));
        }
        Ok(())
    }

    /// The loop over the columns of a row.
    fn columns(&mut self, phase: usize, needed: &HashSet<Value>) -> Result<()> {
        if self.rows == Rows::Kept {
            self.unroll();
            self.line(4, "for (int i = 0; i < ITEMS; ++i) {");
            self.columns_of_item();
            self.chunk(6, phase, needed)?;
            self.line(4, "}");
            return Ok(());
        }
        self.lines(
            4,
            &[
                "for (Index column = lane * (JUMP == 1 ? WIDTH : 1); column < columns; column += SPAN) {",
                "  const int count = count_of(column, columns);",
            ],
        );
        self.declare(6, needed, "");
        self.loads(6, needed, "");
        let sums = self.sums(phase);
        for (s, _) in &sums {
            self.line(6, &format!("float added{s}[WIDTH];"));
        }
        self.chunk(6, phase, needed)?;
        for (s, _) in sums {
            self.unroll();
            self.lines(
                6,
                &[
                    "for (int j = 0; j < WIDTH; ++j) {",
                    "  if (j >= count) continue;",
                    &format!("  float* to = partial(p, piece, kept_row, {s}) + column + j * JUMP;"),
                    &format!("  *to = index == begin ? added{s}[j] : *to + added{s}[j];"),
                    "}",
                ],
            );
        }
        self.line(4, "}");
        Ok(())
    }

    /// The loop over the rows that a block sums, and where it sums them.
    fn begin_sums(&mut self) {
        if self.rows == Rows::Kept {
            for s in 0..self.shape.sums.len() {
                self.line(2, &format!("float sum{s}[ITEMS][WIDTH] = {{}};"));
            }
        }
        let tiles = match self.rows {
            Rows::Kept => "const u32 tiles = (u32)((columns + (SPAN - 1)) / SPAN);",
            Rows::ReadAgain => "constexpr u32 tiles = 1;",
        };
        self.lines(
            2,
            &[
                tiles,
                "const u32 tile = blockIdx.x % tiles, rest = blockIdx.x / tiles;",
                "const Index kept_row = rest % (u32)p.kept;",
                "const i64 piece = rest / (u32)p.kept, summed = p.num_rows / p.kept;",
                "[[maybe_unused]] const Index first_column = (Index)tile * SPAN;",
                "const Index begin = (Index)(summed * piece / p.pieces), end = (Index)(summed * (piece + 1) / p.pieces);",
                "[[maybe_unused]] const bool exists = tile == 0;",
            ],
        );
        if self.phases == 1 {
            self.line(0, "#pragma unroll 4");
        }
        self.lines(
            2,
            &[
                "for (Index index = begin + threadIdx.x / LANES; index < end; index += ROWS) {",
                "  const Index row = index * (Index)p.kept + kept_row;",
            ],
        );
    }

    /// Adds up the rows of a block, in order, and gives them away.
    fn end_sums(&mut self) {
        self.line(2, "__shared__ float gathered[ROWS > 1 ? ROWS * SPAN : 1];");
        for (s, id) in self.shape.sums.clone().into_iter().enumerate() {
            let t = self.shape.reads.len() + self.shape.writes.len() + s;
            let c_type = memory_type(self.graph.node(id).dtype);
            let done = [
                format!(
                    "if (DIRECT) write(row_of<{c_type}>(p, {t}, kept_row) + column * p.step[{t}], total);"
                ),
                format!("else partial(p, piece, kept_row, {s})[column] = total;"),
            ];
            self.lines(
                2,
                &[
                    "if constexpr (ROWS > 1) {",
                    "  __syncthreads();",
                    "#pragma unroll",
                    "  for (int i = 0; i < ITEMS; ++i)",
                    "#pragma unroll",
                    "    for (int j = 0; j < WIDTH; ++j)",
                    &format!(
                        "      gathered[threadIdx.x / LANES * SPAN + column_of(0, i, lane) + j * JUMP] = sum{s}[i][j];"
                    ),
                    "  __syncthreads();",
                    "  for (int c = threadIdx.x; c < SPAN; c += LANES * ROWS) {",
                    "    float total = 0.0f;",
                    "#pragma unroll",
                    "    for (int r = 0; r < ROWS; ++r) total += gathered[r * SPAN + c];",
                    "    const i64 column = first_column + c;",
                    "    if (column >= columns) continue;",
                    &format!("    {}", done[0]),
                    &format!("    {}", done[1]),
                    "  }",
                    "} else {",
                    "#pragma unroll",
                    "  for (int i = 0; i < ITEMS; ++i)",
                    "#pragma unroll",
                    "    for (int j = 0; j < WIDTH; ++j) {",
                    "      const i64 column = column_of(first_column, i, lane) + j * JUMP;",
                    &format!("      const float total = sum{s}[i][j];"),
                    "      if (column >= columns) continue;",
                    &format!("      {}", done[0]),
                    &format!("      {}", done[1]),
                    "    }",
                    "}",
                ],
            );
        }
    }

    /// The second stage: pieces are added up, 8 threads for a column and then those, in order.
    pub(super) fn write_totals(&mut self, name: &str) {
        self.head(&format!("{name}_total"), "256");
        self.lines(
            2,
            &[
                "__shared__ float parts[8][32];",
                "begin_kernel();",
                "const i64 width = p.kept * p.columns, at = (i64)blockIdx.x * 32 + threadIdx.x % 32;",
                "const int group = threadIdx.x / 32;",
                "float total = 0.0f;",
                "if (at < width) {",
                "  const float* from = (const float*)p.partials + blockIdx.y * width + at;",
                "#pragma unroll 8",
                "  for (i64 piece = group; piece < p.pieces; piece += 8) total += from[piece * (SUMS * width)];",
                "}",
                "parts[group][threadIdx.x % 32] = total;",
                "__syncthreads();",
                "if (group > 0 || at >= width) return;",
                "total = 0.0f;",
                "#pragma unroll",
                "for (int g = 0; g < 8; ++g) total += parts[g][threadIdx.x % 32];",
                "const Index row = (Index)(at / p.columns);",
                "const i64 column = at - (i64)row * p.columns;",
            ],
        );
        let first = self.shape.reads.len() + self.shape.writes.len();
        for (s, &id) in self.shape.sums.clone().iter().enumerate() {
            let (t, c_type) = (first + s, memory_type(self.graph.node(id).dtype));
            let to = format!("row_of<{c_type}>(p, {t}, row) + column * p.step[{t}]");
            self.line(2, &format!("if (blockIdx.y == {s}) write({to}, total);"));
        }
        self.line(0, "}");
    }
}
