//! What others claim of such kernels, as it was measured.

use super::print;
use crate::commands::evidence::claims::examples;
use warpsmith::lab::evidence;

/// Prints a case of each claim as the records of the repository have it; outside of it, where they are.
pub fn show() {
    let records = evidence::folder(None).and_then(|folder| evidence::load(&folder)).unwrap_or_default();
    println!();
    match records.iter().find(|record| record.machine.is_gpu()) {
        None => print("What was measured of well-known claims is in the repository: docs/claims.md."),
        Some(record) => {
            let device = &record.machine.device;
            print(&format!(
                "Claims, as measured on {device} (in brackets the most that it allows; docs/claims.md):"
            ));
            examples(record).iter().for_each(|line| print(line));
        }
    }
}
