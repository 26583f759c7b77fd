//! The commands, one file each: `Args` is the command line, `run` executes it.

pub mod bench;
pub mod bench_model;
pub mod bench_serve;
pub mod build_kernels;
pub mod cache;
pub mod chat;
pub mod check;
pub mod completions;
pub mod demo;
pub mod doctor;
pub mod dump;
pub mod evidence;
pub mod explain;
pub mod fuse;
pub mod generate;
pub mod inspect;
pub mod list;
pub mod new_op;
pub mod run;
pub mod serve;
pub mod tune;
