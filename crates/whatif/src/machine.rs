//! The GPU of the model: its measured rates, and what others have.

use serde::{Deserialize, Serialize};
use warpsmith::device::{DeviceInfo, known_arch};
use warpsmith::lab::evidence::Record;
use warpsmith::{Error, Result};

/// The rates of a GPU that times depend on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Its name.
    pub name: String,
    /// Multiprocessors.
    pub units: f64,
    /// Their clock in MHz.
    pub clock_mhz: f64,
    /// GB/s of a copy, read and written bytes together.
    pub copy_gbps: f64,
    /// TFLOP/s of products of 16-bit types.
    pub half_tflops: f64,
    /// Of 8-bit types.
    pub fp8_tflops: f64,
    /// Of f32 cut to TF32.
    pub tf32_tflops: f64,
    /// Megabytes of L2.
    pub l2_mib: f64,
    /// Bytes of keys and values of each call that need not be read, as they are kept on the chip.
    #[serde(skip)]
    pub kv_on_chip: f64,
}

/// Exponentials that a multiprocessor computes in a cycle: 4 in each of its 4 partitions (CUDA C++ Programming Guide,
/// table of arithmetic throughput: 16 results per cycle for compute capability 8.0 to 9.0).
const EXPONENTIALS: f64 = 16.0;

impl Machine {
    /// The GPU of a record, with the ceilings measured on it.
    ///
    /// # Errors
    /// If the record lacks a ceiling or the clocks.
    pub fn of(record: &Record) -> Result<Machine> {
        let missing = |what: &str| {
            Error::parse(format!("the evidence of {}", record.machine.device), what, "a record without it")
        };
        let ceilings = record.ceilings.as_ref().ok_or_else(|| missing("measured ceilings"))?;
        let clocks = record.machine.clocks.as_ref().ok_or_else(|| missing("clocks of a GPU"))?;
        let rate = |rate: Option<f64>, name: &str| rate.ok_or_else(|| missing(name));
        let card = Card::find(&record.machine.device)?;
        let info = card.info();
        Ok(Machine {
            name: record.machine.device.clone(),
            units: info.units as f64,
            clock_mhz: f64::from(clocks.sm_mhz),
            copy_gbps: ceilings.copy_gbps,
            half_tflops: rate(ceilings.half_tflops, "a ceiling of 16-bit products")?,
            fp8_tflops: rate(ceilings.fp8_tflops, "a ceiling of 8-bit products")?,
            tf32_tflops: rate(ceilings.tf32_tflops, "a ceiling of TF32 products")?,
            l2_mib: (info.cache_bytes >> 20) as f64,
            kv_on_chip: 0.0,
        })
    }

    /// The same GPU with the memory, multiprocessors, products and L2 of another: each measured rate is multiplied by the
    /// ratio of the two data sheets.
    pub fn as_card(&self, from: &Card, to: &Card) -> Machine {
        let info = to.info();
        let scale = |rate: f64, of: fn(&Card) -> f64| rate * of(to) / of(from);
        Machine {
            name: to.name.into(),
            units: info.units as f64,
            clock_mhz: scale(self.clock_mhz, |card| card.clock_mhz),
            copy_gbps: scale(self.copy_gbps, |card| card.memory_gbps),
            half_tflops: scale(self.half_tflops, |card| card.half_tflops),
            fp8_tflops: scale(self.fp8_tflops, |card| card.fp8_tflops.unwrap_or(card.half_tflops)),
            tf32_tflops: scale(self.tf32_tflops, |card| card.tf32_tflops),
            l2_mib: (info.cache_bytes >> 20) as f64,
            kv_on_chip: self.kv_on_chip,
        }
    }

    /// Microseconds that moving this many bytes takes.
    pub fn moving(&self, bytes: f64) -> f64 {
        bytes / (self.copy_gbps * 1e3)
    }

    /// Microseconds of this many cycles, divided among all multiprocessors.
    pub fn cycles(&self, count: f64) -> f64 {
        count / (self.units * self.clock_mhz)
    }

    /// Microseconds of this many exponentials on all multiprocessors.
    pub fn exponentials(&self, count: f64) -> f64 {
        count / (EXPONENTIALS * self.units * self.clock_mhz)
    }
}

/// A GPU as its data sheet describes it: dense rates, without sparsity.
#[derive(Debug, Clone, PartialEq)]
pub struct Card {
    /// Its name.
    pub name: &'static str,
    arch: &'static str,
    memory_gbps: f64,
    half_tflops: f64,
    fp8_tflops: Option<f64>,
    tf32_tflops: f64,
    clock_mhz: f64,
}

/// Multiprocessors and L2 are those of the library's table of cards. The rates are from NVIDIA's data sheets, halved where a
/// sheet has them with sparsity; clocks are the boost clocks, where a sheet or white paper has one.
pub const CARDS: [Card; 5] = [
    // "NVIDIA A100 Tensor Core GPU" data sheet, 80 GB SXM; clock: "NVIDIA A100 Tensor Core GPU Architecture".
    Card {
        name: "A100",
        arch: "80",
        memory_gbps: 2039.0,
        half_tflops: 312.0,
        fp8_tflops: None,
        tf32_tflops: 156.0,
        clock_mhz: 1410.0,
    },
    // "NVIDIA L40S" data sheet.
    Card {
        name: "L40S",
        arch: "89",
        memory_gbps: 864.0,
        half_tflops: 362.05,
        fp8_tflops: Some(733.0),
        tf32_tflops: 183.0,
        clock_mhz: 2520.0,
    },
    // "NVIDIA H100 Tensor Core GPU" data sheet, SXM.
    Card {
        name: "H100",
        arch: "90a",
        memory_gbps: 3350.0,
        half_tflops: 989.5,
        fp8_tflops: Some(1979.0),
        tf32_tflops: 494.5,
        clock_mhz: 1980.0,
    },
    // "NVIDIA H200 Tensor Core GPU" data sheet, SXM; clock: the records.
    Card {
        name: "H200",
        arch: "90a",
        memory_gbps: 4800.0,
        half_tflops: 989.5,
        fp8_tflops: Some(1979.0),
        tf32_tflops: 494.5,
        clock_mhz: 1980.0,
    },
    // "NVIDIA HGX B200" data sheet, an eighth of the board. It names no clock: that of the H200 stands for it.
    Card {
        name: "B200",
        arch: "100a",
        memory_gbps: 8000.0,
        half_tflops: 2250.0,
        fp8_tflops: Some(4500.0),
        tf32_tflops: 1100.0,
        clock_mhz: 1980.0,
    },
];

impl Card {
    /// The card with this name, in any case, with or without the maker's.
    ///
    /// # Errors
    /// Names the cards that are known.
    pub fn find(name: &str) -> Result<Card> {
        let plain = name.to_ascii_uppercase().replace("NVIDIA", "");
        let found = CARDS.iter().find(|card| plain.trim() == card.name);
        found.cloned().ok_or_else(|| {
            let known: Vec<&str> = CARDS.iter().map(|card| card.name).collect();
            Error::parse("GPU", format!("one of {}", known.join(", ")), name)
        })
    }

    /// A card of its architecture, with the library's multiprocessors and L2.
    pub fn info(&self) -> DeviceInfo {
        DeviceInfo::typical_gpu(known_arch(self.arch).expect("the table names architectures"), None)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Round numbers of an H200.
    pub(crate) fn h200() -> Machine {
        Machine {
            name: "NVIDIA H200".into(),
            units: 132.0,
            clock_mhz: 1980.0,
            copy_gbps: 4300.0,
            half_tflops: 950.0,
            fp8_tflops: 1860.0,
            tf32_tflops: 480.0,
            l2_mib: 50.0,
            kv_on_chip: 0.0,
        }
    }

    #[test]
    fn another_card_scales_the_measured_rates_by_the_data_sheets() {
        let [h200_card, b200] = ["H200", "B200"].map(|name| Card::find(name).unwrap());
        let machine = h200().as_card(&h200_card, &b200);
        assert_eq!((machine.name.as_str(), machine.units), ("B200", 148.0));
        assert!((machine.copy_gbps / 4300.0 - 8000.0 / 4800.0).abs() < 1e-9);
        assert_eq!(h200().as_card(&h200_card, &h200_card).copy_gbps, 4300.0);
    }

    #[test]
    fn cards_are_found_by_any_spelling_and_others_are_refused() {
        assert_eq!(Card::find("NVIDIA H200").unwrap().name, "H200");
        assert_eq!(Card::find("b200").unwrap().name, "B200");
        let error = Card::find("H300").unwrap_err().to_string();
        assert!(error.contains("A100, L40S, H100, H200, B200") && error.contains("H300"), "{error}");
    }

    #[test]
    fn every_card_has_the_multiprocessors_of_the_librarys_table() {
        let units = CARDS.clone().map(|card| card.info().units);
        assert_eq!(units, [108, 142, 132, 132, 148]);
    }
}
