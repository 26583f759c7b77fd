//! The numbers of a step, packed into one piece of memory, and the tensors that lie in it.

use crate::batch::{Batch, Shared, slot};
use crate::error::Result;
use crate::sampler::{self, Draw};
use warpsmith::{DType, Device, Stream, Tensor};

/// What a step computes for one sequence.
pub(crate) struct Row<'a> {
    /// The new token; ignored where the device takes the tokens it chose last.
    pub id: i32,
    /// Its place in the sequence.
    pub position: usize,
    /// The pages of the sequence, enough for the new token too.
    pub pages: &'a [i32],
    /// How the next token is chosen.
    pub draw: Draw<'a>,
}

/// The shape of a step: rows, filled up to a bucket, and pages in a row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Form {
    pub rows: usize,
    pub width: usize,
    /// Groups of rows that begin with the same pages; 0 for none.
    pub groups: usize,
}

/// The columns in the order of memory, the wide ones first, and the table behind them.
#[derive(Clone, Copy)]
enum Column {
    Seed,
    Place,
    Ids,
    Positions,
    Slots,
    KvLens,
    Temperature,
    TopK,
    TopP,
    MinP,
    Table,
}

impl Column {
    /// Where it begins, in words for each row.
    fn start(self) -> usize {
        match self {
            Column::Seed => 0,
            Column::Place => 2,
            narrow => narrow as usize + 2,
        }
    }
}

impl Form {
    /// Where a column begins, in words. Every column begins at a multiple of 16 bytes.
    fn start(self, column: Column) -> usize {
        column.start() * self.rows.next_multiple_of(4)
    }

    /// Where the starts of groups begin, in words, and the keys of their prefixes.
    fn group_starts(self) -> [usize; 2] {
        let starts = (self.start(Column::Table) + self.rows * self.width).next_multiple_of(4);
        [starts, starts + (self.groups + 1).next_multiple_of(4)]
    }

    /// Words of all columns, the table and the groups.
    pub fn words(self) -> usize {
        let [_, lens] = self.group_starts();
        lens + self.groups
    }

    /// Where the tokens begin, in words.
    pub fn ids(self) -> usize {
        self.start(Column::Ids)
    }

    /// Packs rows. Those that are missing have no keys and store none. `shared` has the numbers of the groups.
    pub fn pack(
        self,
        rows: &[Option<Row<'_>>],
        page_size: usize,
        shared: Option<&[Vec<i32>; 2]>,
        words: &mut Vec<i32>,
    ) {
        words.clear();
        words.resize(self.words(), 0);
        let slots = self.start(Column::Slots);
        words[slots..slots + self.rows].fill(-1);
        for (numbers, at) in shared.into_iter().flatten().zip(self.group_starts()) {
            words[at..at + numbers.len()].copy_from_slice(numbers);
        }
        for (i, row) in rows.iter().enumerate() {
            let Some(row) = row else { continue };
            let (params, seed, place) = (row.draw.params, row.draw.seed, row.draw.position as u64);
            for (column, value) in [(Column::Seed, seed), (Column::Place, place)] {
                let at = self.start(column) + 2 * i;
                words[at] = value as i32;
                words[at + 1] = (value >> 32) as i32;
            }
            for (column, value) in [
                (Column::Ids, row.id),
                (Column::Positions, row.position as i32),
                (Column::Slots, slot(row.pages, row.position, page_size)),
                (Column::KvLens, row.position as i32 + 1),
                (Column::Temperature, params.temperature.to_bits() as i32),
                (Column::TopK, sampler::top_k(params)),
                (Column::TopP, params.top_p.to_bits() as i32),
                (Column::MinP, params.min_p.to_bits() as i32),
            ] {
                words[self.start(column) + i] = value;
            }
            let at = self.start(Column::Table) + i * self.width;
            words[at..at + row.pages.len()].copy_from_slice(row.pages);
        }
    }
}

/// The tensors of a step.
pub(super) struct Inputs {
    pub batch: Batch,
    pub seed: Tensor,
    pub place: Tensor,
    pub temperature: Tensor,
    pub top_k: Tensor,
    pub top_p: Tensor,
    pub min_p: Tensor,
}

impl Inputs {
    /// `part` makes the tensor that begins this many words from the start.
    pub fn new(
        form: Form,
        always_share: bool,
        stream: &Stream,
        part: impl Fn(usize, &[usize], DType) -> Result<Tensor>,
    ) -> Result<Inputs> {
        let column = |column: Column, dtype| part(form.start(column), &[form.rows], dtype);
        let [starts, lens] = form.group_starts();
        let shared = match form.groups {
            0 => None,
            groups => Some(Shared {
                group_starts: part(starts, &[1, groups + 1], DType::I32)?,
                prefix_lens: part(lens, &[1, groups], DType::I32)?,
                always: always_share,
            }),
        };
        Ok(Inputs {
            batch: Batch {
                ids: column(Column::Ids, DType::I32)?,
                positions: column(Column::Positions, DType::I32)?,
                slots: column(Column::Slots, DType::I32)?,
                page_table: part(form.start(Column::Table), &[form.rows, form.width], DType::I32)?,
                kv_lens: column(Column::KvLens, DType::I32)?,
                q_starts: None,
                shared,
                adapted: Vec::new(),
                logit_rows: None,
                stream: stream.clone(),
            },
            seed: column(Column::Seed, DType::I64)?,
            place: column(Column::Place, DType::I64)?,
            temperature: column(Column::Temperature, DType::F32)?,
            top_k: column(Column::TopK, DType::I32)?,
            top_p: column(Column::TopP, DType::F32)?,
            min_p: column(Column::MinP, DType::F32)?,
        })
    }

    /// On the CPU: copies of the words.
    pub fn on_host(form: Form, always_share: bool, words: &[i32]) -> Result<Inputs> {
        Inputs::new(form, always_share, &Stream::Host, |start, shape, dtype| {
            let count = shape.iter().product::<usize>() * dtype.size() / 4;
            let bytes: Vec<u8> =
                words[start..start + count].iter().flat_map(|word| word.to_ne_bytes()).collect();
            Ok(Tensor::from_bytes(&bytes, shape, dtype, Device::Cpu)?)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::SamplingParams;
    use crate::sampler::History;

    #[test]
    fn rows_come_out_as_they_went_in_and_the_rest_is_harmless() {
        let params =
            SamplingParams { temperature: 0.5, top_k: 7, top_p: 0.25, min_p: 0.125, ..Default::default() };
        let history = History::default();
        let row = |i: usize, pages| Row {
            id: 10 + i as i32,
            position: 5 + i,
            pages,
            draw: Draw {
                row: i,
                params: &params,
                seed: u64::MAX - i as u64,
                position: 6 + i,
                history: &history,
                constrained: false,
                allowed: None,
            },
        };
        let form = Form { rows: 5, width: 4, groups: 2 };
        let mut words = vec![99; 1000];
        let rows = [Some(row(0, &[8, 3])), None, Some(row(1, &[2, 9, 4]))];
        form.pack(&rows, 4, Some(&[vec![0, 1, 3], vec![4, 8]]), &mut words);
        let inputs = Inputs::on_host(form, true, &words).unwrap();
        let ints = |tensor: &Tensor| tensor.to_vec::<i32>().unwrap();
        let reals = |tensor: &Tensor| tensor.to_vec::<f32>().unwrap();
        let shared = inputs.batch.shared.as_ref().unwrap();
        assert!(ints(&shared.group_starts) == [0, 1, 3] && ints(&shared.prefix_lens) == [4, 8]);
        let plain = Form { groups: 0, ..form };
        plain.pack(&rows, 4, None, &mut words);
        assert!(Inputs::on_host(plain, true, &words).unwrap().batch.shared.is_none());
        assert_eq!(ints(&inputs.batch.ids), [10, 0, 11, 0, 0]);
        assert_eq!(ints(&inputs.batch.positions), [5, 0, 6, 0, 0]);
        assert_eq!(ints(&inputs.batch.slots), [3 * 4 + 1, -1, 9 * 4 + 2, -1, -1]);
        assert_eq!(ints(&inputs.batch.kv_lens), [6, 0, 7, 0, 0]);
        assert_eq!(ints(&inputs.batch.page_table)[..12], [8, 3, 0, 0, 0, 0, 0, 0, 2, 9, 4, 0]);
        assert_eq!(inputs.seed.to_vec::<i64>().unwrap()[..3], [-1, 0, -2]);
        assert_eq!(inputs.place.to_vec::<i64>().unwrap(), [6, 0, 7, 0, 0]);
        assert_eq!(reals(&inputs.temperature), [0.5, 0.0, 0.5, 0.0, 0.0]);
        assert_eq!(ints(&inputs.top_k), [7, 0, 7, 0, 0]);
        assert_eq!(reals(&inputs.top_p)[..3], [0.25, 0.0, 0.25]);
        assert_eq!(reals(&inputs.min_p)[..3], [0.125, 0.0, 0.125]);
    }
}
