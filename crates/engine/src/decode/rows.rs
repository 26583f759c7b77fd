//! The numbers of a step, packed into one piece of memory, and the tensors that lie in it.

use crate::batch::{Batch, slot};
use crate::error::Result;
use crate::sampler::{self, Draw};
use warpsmith::{DType, Device, Stream, Tensor};

/// What a step computes for one sequence.
pub(crate) struct Row<'a> {
    /// The new token; of no matter where the device is to take those that it chose last.
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

    /// Words of all columns.
    pub fn words(self) -> usize {
        self.start(Column::Table) + self.rows * self.width
    }

    /// Where the tokens begin, in words.
    pub fn ids(self) -> usize {
        self.start(Column::Ids)
    }

    /// Packs rows. Those that are missing have no keys and store none.
    pub fn pack(self, rows: &[Option<Row<'_>>], page_size: usize, words: &mut Vec<i32>) {
        words.clear();
        words.resize(self.words(), 0);
        let slots = self.start(Column::Slots);
        words[slots..slots + self.rows].fill(-1);
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
    /// `part` makes the tensor that begins so many words from the start.
    pub fn new(
        form: Form,
        stream: &Stream,
        part: impl Fn(usize, &[usize], DType) -> Result<Tensor>,
    ) -> Result<Inputs> {
        let column = |column: Column, dtype| part(form.start(column), &[form.rows], dtype);
        Ok(Inputs {
            batch: Batch {
                ids: column(Column::Ids, DType::I32)?,
                positions: column(Column::Positions, DType::I32)?,
                slots: column(Column::Slots, DType::I32)?,
                page_table: part(form.start(Column::Table), &[form.rows, form.width], DType::I32)?,
                kv_lens: column(Column::KvLens, DType::I32)?,
                q_starts: None,
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
    pub fn on_host(form: Form, words: &[i32]) -> Result<Inputs> {
        Inputs::new(form, &Stream::Host, |start, shape, dtype| {
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
            },
        };
        let form = Form { rows: 5, width: 4 };
        let mut words = vec![99; 1000];
        form.pack(&[Some(row(0, &[8, 3])), None, Some(row(1, &[2, 9, 4]))], 4, &mut words);
        let inputs = Inputs::on_host(form, &words).unwrap();
        let ints = |tensor: &Tensor| tensor.to_vec::<i32>().unwrap();
        let reals = |tensor: &Tensor| tensor.to_vec::<f32>().unwrap();
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
