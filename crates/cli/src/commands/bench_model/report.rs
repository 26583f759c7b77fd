//! The table of what was measured.

use super::runs::Reads;
use serde_json::{Value, json};
use warpsmith::Device;

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Form {
    /// A table in Markdown
    Md,
    /// A JSON array
    Json,
}

/// A row of the table.
pub struct Row {
    test: String,
    /// Tokens per second of each run.
    rates: Vec<f64>,
    /// Milliseconds of each run, or of each step of it.
    milliseconds: Vec<f64>,
    /// How many times as fast as the row before.
    ratio: Option<f64>,
    /// The least it read from memory.
    reads: Option<Reads>,
}

impl Row {
    /// A test of this many tokens and steps, from the seconds of its runs.
    pub fn new(test: String, tokens: usize, seconds: &[f64], steps: usize) -> Row {
        Row {
            test,
            rates: seconds.iter().map(|seconds| tokens as f64 / seconds).collect(),
            milliseconds: seconds.iter().map(|seconds| 1e3 * seconds / steps as f64).collect(),
            ratio: None,
            reads: None,
        }
    }

    /// Adds the least it read from memory.
    pub fn reading(self, reads: Reads) -> Row {
        Row { reads: Some(reads), ..self }
    }

    /// So many times as fast as the row before.
    pub fn faster(self, ratio: f64) -> Row {
        Row { ratio: Some(ratio), ..self }
    }

    /// The mean of a run or a step.
    pub fn milliseconds(&self) -> f64 {
        mean(&self.milliseconds)
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn deviation(values: &[f64]) -> f64 {
    let (mean, others) = (mean(values), (values.len() - 1).max(1) as f64);
    (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / others).sqrt()
}

/// Everything that was measured of a model.
pub struct Report {
    pub model: String,
    pub bytes: usize,
    pub parameters: usize,
    pub device: Device,
    /// CUDA graphs that were captured, and why there are no more.
    pub graphs: usize,
    pub graph_failure: Option<String>,
    pub rows: Vec<Row>,
}

impl Report {
    pub fn print(&self, form: Form) {
        match form {
            Form::Md => print!("{}", self.markdown()),
            Form::Json => println!("{:#}", self.json()),
        }
    }

    fn markdown(&self) -> String {
        let mut table = "| model | size | params | device | test | t/s | ms |\n".to_owned();
        table += "| --- | ---: | ---: | --- | ---: | ---: | ---: |\n";
        let size = format!("{:.2} MiB", self.bytes as f64 / (1 << 20) as f64);
        let parameters = format!("{:.2} M", self.parameters as f64 / 1e6);
        let device = match self.device {
            Device::Cpu => format!("cpu, {} threads", warpsmith::cpu::num_threads()),
            Device::Cuda(_) => format!("{}, {} graphs", self.device, self.graphs),
        };
        for row in &self.rows {
            let rate = format!("{:.2} ± {:.2}", mean(&row.rates), deviation(&row.rates));
            let ratio = row.ratio.map(|ratio| format!(" ({ratio:.1} times as fast)")).unwrap_or_default();
            let time = format!("{:.3}{ratio}", row.milliseconds());
            table += &format!(
                "| {} | {size} | {parameters} | {device} | {} | {rate} | {time} |\n",
                self.model, row.test
            );
        }
        if let Some(why) = &self.graph_failure {
            table += &format!("\nWithout CUDA graphs: {why}\n");
        }
        table
    }

    fn json(&self) -> Value {
        let row = |row: &Row| {
            json!({
                "model": self.model, "bytes": self.bytes, "parameters": self.parameters,
                "device": self.device.to_string(), "threads": warpsmith::cpu::num_threads(),
                "graphs": self.graphs, "graph_failure": self.graph_failure,
                "test": row.test, "mean": mean(&row.rates), "deviation": deviation(&row.rates),
                "samples": row.rates, "milliseconds": row.milliseconds(), "ratio": row.ratio,
                "steps": row.reads.map(|reads| reads.steps), "keys_read": row.reads.map(|reads| reads.keys),
            })
        };
        self.rows.iter().map(row).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_shows_rates_and_times_and_what_went_wrong() {
        let rows = vec![
            Row::new("tg10@4".into(), 40, &[2.0, 2.0], 10),
            Row::new("prefix8 again".into(), 8, &[0.5], 1).faster(3.0),
        ];
        let mut report = Report {
            model: "llama".into(),
            bytes: 1 << 20,
            parameters: 2_000_000,
            device: Device::Cuda(0),
            graphs: 3,
            graph_failure: None,
            rows,
        };
        let table = report.markdown();
        assert!(table.contains("| cuda:0, 3 graphs | tg10@4 | 20.00 ± 0.00 | 200.000 |"), "{table}");
        assert!(table.contains("| prefix8 again | 16.00 ± 0.00 | 500.000 (3.0 times as fast) |"), "{table}");
        assert!(!table.contains("Without"));
        report.graph_failure = Some("of no memory".into());
        assert!(report.markdown().ends_with("\nWithout CUDA graphs: of no memory\n"));
        let json = report.json();
        assert_eq!((json[0]["milliseconds"].as_f64(), json[1]["ratio"].as_f64()), (Some(200.0), Some(3.0)));
    }
}
