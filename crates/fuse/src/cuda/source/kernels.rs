//! The kernels around the columns.

use super::super::variant::Rows;
use super::body::Pipeline;
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
        self.loads(4, &needed, "", "");
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
        match self.pipeline() {
            Pipeline::None | Pipeline::Each => {}
            Pipeline::Ahead => self.line(4, "}"),
            Pipeline::Next => self.advance(&self.all_needs()),
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
        // Indices of gathers are among the values of rows, which come with the first phase.
        let gathers = self.shape.gathers();
        if self.pipeline() == Pipeline::None {
            let all = self.all_needs();
            self.declare(4, &all, "[ITEMS]");
            if !gathers {
                self.load_loop(&all);
            }
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
        self.columns_of_item(6);
        self.loads(6, wanted, "", "[i]");
        self.line(4, "}");
    }

    pub(super) fn columns_of_item(&mut self, indent: usize) {
        self.lines(
            indent,
            &[
                "const Index column = column_of(first_column, i, lane);",
                "[[maybe_unused]] const int count = count_of(column, columns);",
            ],
        );
    }

    /// What is between two reductions.
    fn phase(&mut self, phase: usize) -> Result<()> {
        self.row_values(phase)?;
        let own = self.rows == Rows::Kept && self.pipeline() == Pipeline::None;
        if phase == 0 && own && self.shape.gathers() {
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
                Reduce::Mean => format!("divided({over}, (float)columns)"),
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
            self.columns_of_item(6);
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
        self.loads(6, needed, "", "");
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
            Rows::Kept => "const Index tiles = (columns + (SPAN - 1)) / SPAN;",
            Rows::ReadAgain => "constexpr Index tiles = 1;",
        };
        self.lines(
            2,
            &[
                tiles,
                "const Index kept = ONE ? 1 : (Index)p.kept, pieces = (Index)p.pieces;",
                "const Index rest = (Index)blockIdx.x / tiles, tile = (Index)blockIdx.x - rest * tiles;",
                "const Index piece = rest / kept, kept_row = rest - piece * kept;",
                "[[maybe_unused]] const Index first_column = tile * SPAN;",
                // The first pieces have one row more, if they do not come out even.
                "const Index summed = (Index)p.num_rows / kept, share = summed / pieces, more = summed - share * pieces;",
                "const Index begin = piece * share + (piece < more ? piece : more);",
                "const Index end = begin + share + (piece < more ? 1 : 0);",
                "[[maybe_unused]] const bool exists = tile == 0;",
            ],
        );
        self.fetch_same(&self.all_needs());
        match self.pipeline() {
            Pipeline::None | Pipeline::Each => {
                self.lines(
                    2,
                    &[
                        "for (Index index = begin + threadIdx.x / LANES; index < end; index += ROWS) {",
                        "  const Index row = index * kept + kept_row;",
                    ],
                );
                if self.pipeline() == Pipeline::Each {
                    let all = self.all_needs();
                    self.declare_row(&all, "", "");
                    self.fetch(&all, "", "");
                }
            }
            Pipeline::Ahead => self.begin_ahead(),
            Pipeline::Next => self.begin_next(),
        }
    }

    /// Loads some rows, and begins to go through them.
    fn begin_ahead(&mut self) {
        let (all, ahead) = (self.all_needs(), self.ahead);
        let next = format!("first += ROWS * {ahead}");
        self.line(2, &format!("for (Index first = begin + threadIdx.x / LANES; first < end; {next}) {{"));
        self.declare_row(&all, "", &format!("[{ahead}]"));
        for loads in [true, false] {
            self.unroll();
            self.lines(
                4,
                &[
                    &format!("for (int u = 0; u < {ahead}; ++u) {{"),
                    "  const Index index = first + u * ROWS;",
                    "  if (index >= end) break;",
                    "  const Index row = index * kept + kept_row;",
                ],
            );
            if loads {
                self.fetch(&all, "", "[u]");
                self.line(4, "}");
            }
        }
    }

    /// Loads the first row, begins to go through all, and loads the one after each.
    fn begin_next(&mut self) {
        let all = self.all_needs();
        self.declare_row(&all, "", "");
        self.lines(
            2,
            &[
                "Index index = begin + threadIdx.x / LANES;",
                "if (index < end) {",
                "  const Index row = index * kept + kept_row;",
            ],
        );
        self.fetch(&all, "", "");
        self.lines(2, &["}", "for (; index < end; index += ROWS) {"]);
        self.declare_row(&all, "next_", "");
        self.lines(
            4,
            &["if (index + ROWS < end) {", "  const Index row = (index + ROWS) * kept + kept_row;"],
        );
        self.fetch(&all, "next_", "");
        self.lines(4, &["}", "const Index row = index * kept + kept_row;"]);
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
                    "#pragma unroll 1",
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

    /// The second stage: pieces are added up, `GROUPS` threads for a column and then those, in order.
    pub(super) fn write_totals(&mut self, name: &str) {
        self.head(&format!("{name}_total"), "GROUPS * 32");
        self.lines(
            2,
            &[
                "__shared__ float parts[GROUPS][32];",
                "begin_kernel();",
                "const Index columns = columns_of(p), width = (ONE ? 1 : (Index)p.kept) * columns;",
                "const Index at = (Index)blockIdx.x * 32 + threadIdx.x % 32;",
                "const int group = threadIdx.x / 32, pieces = (int)p.pieces;",
                "float total = 0.0f;",
                "if (at < width) {",
                "  const i64 step = (i64)width * SUMS;",
                "  const float* from = in_global_memory<const float>(p.partials) + (i64)blockIdx.y * width + at;",
                // All loads of a round come before the first sum.
                "#pragma unroll 1",
                "  for (int piece = group; piece < pieces; piece += 8 * GROUPS) {",
                "    float part[8];",
            ],
        );
        self.unroll();
        self.lines(
            6,
            &[
                "for (int i = 0; i < 8; ++i) {",
                "  const int at_piece = piece + i * GROUPS;",
                "  part[i] = at_piece < pieces ? from[at_piece * step] : 0.0f;",
                "}",
            ],
        );
        self.unroll();
        self.lines(
            2,
            &[
                "    for (int i = 0; i < 8; ++i) total += part[i];",
                "  }",
                "}",
                "parts[group][threadIdx.x % 32] = total;",
                "__syncthreads();",
                "if (group > 0 || at >= width) return;",
                "total = 0.0f;",
            ],
        );
        self.unroll();
        self.lines(
            2,
            &[
                "for (int g = 0; g < GROUPS; ++g) total += parts[g][threadIdx.x % 32];",
                "const Index row = ONE ? 0 : at / columns;",
                "const i64 column = at - row * columns;",
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
