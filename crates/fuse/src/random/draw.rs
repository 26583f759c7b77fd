//! Drawing graphs and tensors from a seed.

use crate::error::Result;
use crate::eval::Given;
use crate::functions::{Value, call};
use crate::graph::{Builder, Graph, NodeId};
use crate::op::{Binary, Reduce, Unary};
use crate::shape::Dim;
use crate::types::{Scalar, is_int};
use warpsmith::DType;
use warpsmith::tensor::Random;

/// Most elements of a tensor.
const MAX_ELEMENTS: usize = 60_000;

/// A graph and tensors for it.
#[derive(Clone, Debug)]
pub struct Draw {
    /// The graph.
    pub graph: Graph,
    /// Sizes and elements of each input; numbers of its type.
    pub inputs: Vec<(Vec<usize>, Given)>,
    /// How each input lies in memory: the order of its dimensions, and whether there are gaps.
    pub layouts: Vec<(Vec<usize>, bool)>,
}

struct Source {
    random: Random,
    builder: Builder,
    /// What can be used, newest last.
    pool: Vec<NodeId>,
    dims: Vec<Dim>,
    inputs: usize,
}

/// The graph of a seed, with 1 to about 20 operations.
///
/// # Errors
/// None, unless the generator is wrong.
pub fn draw(seed: u64) -> Result<Draw> {
    let mut random = Random::new(seed);
    let rank = 1 + random.below(4) as usize;
    let mut sizes: Vec<usize> = (0..rank).map(|_| size(&mut random)).collect();
    // A long row now and then: they are worked on in chunks.
    if random.below(6) == 0 {
        sizes[rank - 1] = 1000 + random.below(5000) as usize;
    }
    for d in 0..rank {
        while sizes[d] > 1 && sizes.iter().product::<usize>() > MAX_ELEMENTS {
            sizes[d] = sizes[d].div_ceil(2);
        }
    }
    let named = random.below(2) == 0;
    let dims = sizes.iter().enumerate().map(|(d, &size)| match named {
        true => Dim::named(&format!("s{d}")),
        false => Dim::Fixed(size),
    });
    let dims: Vec<Dim> = dims.collect();
    let mut source = Source { random, builder: Builder::new(), pool: vec![], dims, inputs: 0 };
    source.input(Some(false))?;
    for _ in 0..source.random.below(3) {
        source.input(None)?;
    }
    for _ in 0..1 + source.random.below(12) {
        // What does not fit is not used.
        let made = source.operation();
        if let Ok(id) = made {
            source.pool.push(id);
        }
    }
    source.finish(&sizes)
}

fn size(random: &mut Random) -> usize {
    match random.below(8) {
        0 => 1,
        1 => 64,
        2 => 256,
        _ => 1 + random.below(70) as usize,
    }
}

impl Source {
    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.random.below(of.len() as u64) as usize]
    }

    /// An input of some type, with some dimensions of size 1 or missing.
    fn input(&mut self, int: Option<bool>) -> Result<NodeId> {
        let dtype = match int {
            Some(false) => self.pick(&[DType::F32, DType::F32, DType::BF16, DType::F16]),
            Some(true) => self.pick(&[DType::I64, DType::I32]),
            None => self.pick(&[
                DType::F32,
                DType::F32,
                DType::BF16,
                DType::BF16,
                DType::F16,
                DType::Bool,
                DType::I32,
                DType::I64,
            ]),
        };
        let mut shape = self.dims.clone();
        if self.inputs > 0 {
            let cut = if self.random.below(3) == 0 {
                self.random.below(shape.len() as u64 + 1) as usize
            } else {
                0
            };
            shape.drain(..cut);
            for dim in &mut shape {
                if self.random.below(5) == 0 {
                    *dim = Dim::Fixed(1);
                }
            }
        }
        let name = format!("x{}", self.inputs);
        self.inputs += 1;
        let id = self.builder.input(&name, dtype, &shape)?;
        self.pool.push(id);
        Ok(id)
    }

    /// Something that was made, more likely lately, or a number, or a new input.
    fn operand(&mut self) -> Result<NodeId> {
        match self.random.below(10) {
            0 if self.inputs < 6 => self.input(None),
            1 => {
                let number = self.pick(&[0.0, 1.0, -1.0, 0.5, 2.0, 0.1, 1.702, -3.0, 1e-3]);
                self.builder.number(number)
            }
            2 => {
                let number = self.random.below(7) as i64 - 3;
                self.builder.scalar(Scalar::Int(number))
            }
            _ => {
                let count = self.pool.len() as u64;
                let at = count - 1 - self.random.below(count).min(self.random.below(count));
                Ok(self.pool[at as usize])
            }
        }
    }

    fn float(&mut self) -> Result<NodeId> {
        let id = self.operand()?;
        if self.builder.node(id).dtype.is_float() { Ok(id) } else { self.builder.cast(id, DType::F32) }
    }

    fn operation(&mut self) -> Result<NodeId> {
        match self.random.below(21) {
            0..=6 => {
                let f = self.pick(&[
                    Binary::Add,
                    Binary::Sub,
                    Binary::Mul,
                    Binary::Mul,
                    Binary::Add,
                    Binary::Div,
                    Binary::Max,
                    Binary::Min,
                ]);
                let (a, b) = (self.operand()?, self.operand()?);
                self.builder.binary(f, a, b)
            }
            7..=10 => {
                let derivatives = 4;
                let f = self.pick(&Unary::ALL[..Unary::ALL.len() - 2 - derivatives]);
                let x = self.operand()?;
                self.builder.unary(f, x)
            }
            11 => {
                let f = self.pick(&Unary::ALL[Unary::ALL.len() - 6..]);
                let x = self.operand()?;
                self.builder.unary(f, x)
            }
            12 | 13 => {
                let f = self.pick(&Reduce::ALL);
                let x = self.operand()?;
                self.builder.reduce(f, x)
            }
            14 => {
                let name =
                    self.pick(&["softmax", "rms_norm", "layer_norm", "log_softmax", "logsumexp", "var"]);
                let x = Value::Node(self.float()?);
                call(&mut self.builder, name, &[x], &[])
            }
            15 => {
                let dtype =
                    self.pick(&[DType::F32, DType::BF16, DType::F16, DType::I32, DType::I64, DType::Bool]);
                let x = self.operand()?;
                self.builder.cast(x, dtype)
            }
            16 => {
                let compare =
                    self.pick(&[Binary::Lt, Binary::Le, Binary::Gt, Binary::Ge, Binary::Eq, Binary::Ne]);
                let (a, b) = (self.operand()?, self.operand()?);
                let condition = self.builder.binary(compare, a, b)?;
                if self.random.below(4) == 0 {
                    return Ok(condition);
                }
                let (a, b) = (self.operand()?, self.operand()?);
                self.builder.select(condition, a, b)
            }
            17 => {
                let x = self.float()?;
                let shape = self.builder.node(x).shape.clone();
                let from = self.random.below(shape.len() as u64 + 1) as usize;
                let mut shape = shape[from..].to_vec();
                for dim in &mut shape {
                    if self.random.below(3) == 0 {
                        *dim = Dim::Fixed(1);
                    }
                }
                self.builder.sum_to(x, &shape)
            }
            19 => {
                let x = self.float()?;
                self.builder.rotate_half(x)
            }
            18 => {
                let x = self.operand()?;
                let dims = self.dims.clone();
                self.builder.expand(x, &dims)
            }
            _ => self.gather(),
        }
    }

    /// Rows of a new table by a new index.
    fn gather(&mut self) -> Result<NodeId> {
        if self.dims.len() < 2 || self.inputs > 5 {
            return self.operand();
        }
        let Some((last, outer)) = self.dims.split_last() else { return self.operand() };
        let (outer, matrix) = (outer.to_vec(), [Dim::Fixed(7), last.clone()]);
        let dtype = self.pick(&[DType::F32, DType::BF16]);
        let (table, index) = (format!("table{}", self.inputs), format!("index{}", self.inputs));
        self.inputs += 2;
        let table = self.builder.input(&table, dtype, &matrix)?;
        let dtype = self.pick(&[DType::I32, DType::I64]);
        let index = self.builder.input(&index, dtype, &outer)?;
        self.builder.gather(table, index)
    }

    fn finish(self, sizes: &[usize]) -> Result<Draw> {
        let Source { mut random, builder, pool, dims, .. } = self;
        let mut outputs = vec![pool[pool.len() - 1]];
        for _ in 0..random.below(3) {
            outputs.push(pool[random.below(pool.len() as u64) as usize]);
        }
        outputs.sort_unstable();
        outputs.dedup();
        let names: Vec<String> = (0..outputs.len()).map(|i| format!("out{i}")).collect();
        let outputs: Vec<(&str, NodeId)> = names.iter().map(String::as_str).zip(outputs).collect();
        let graph = builder.finish(&outputs)?;
        let size_of = |dim: &Dim| match dim {
            Dim::Fixed(size) => *size,
            named => dims.iter().position(|dim| dim == named).map_or(1, |d| sizes[d]),
        };
        let (mut inputs, mut layouts) = (vec![], vec![]);
        for &id in graph.inputs() {
            let node = graph.node(id);
            let shape: Vec<usize> = node.shape.iter().map(size_of).collect();
            let count = shape.iter().product();
            let index = graph.input_name(id).starts_with("index");
            let scale = [1.0, 1.0, 0.1, 10.0, 100.0][random.below(5) as usize];
            let given = if is_int(node.dtype) {
                let number = |_| if index { random.below(7) as i64 } else { random.below(41) as i64 - 20 };
                Given::Ints((0..count).map(number).collect())
            } else {
                Given::Floats((0..count).map(|_| element(&mut random, node.dtype, scale)).collect())
            };
            inputs.push((shape.clone(), given));
            let order = match random.below(3) {
                0 => random.distinct(shape.len(), shape.len()).into_iter().map(|d| d as usize).collect(),
                _ => (0..shape.len()).collect(),
            };
            layouts.push((order, random.below(4) == 0));
        }
        Ok(Draw { graph, inputs, layouts })
    }
}

/// Mostly normal numbers, and now and then one of those that go wrong.
fn element(random: &mut Random, dtype: DType, scale: f64) -> f64 {
    if dtype == DType::Bool {
        return random.below(2) as f64;
    }
    let value = match random.below(300) {
        0 => [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 0.0][random.below(5) as usize],
        1 => [1e30, -1e30, 1e-40, 65504.0, 88.8, -103.9][random.below(6) as usize],
        2..=6 => random.below(9) as f64 - 4.0,
        _ => random.normal() * scale,
    };
    dtype.round(value)
}
