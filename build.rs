//! Compiles `proto/*.proto` with protox, so that no protoc is needed.

use std::{env, error::Error, path::PathBuf};

/// What the library speaks today; a contract joins the list with the room that uses it.
const PROTOS: &[&str] = &["cri-v1", "containerd-events-v1"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("proto");
    let files: Vec<PathBuf> = PROTOS.iter().map(|name| root.join(format!("{name}.proto"))).collect();
    let descriptors = protox::compile(&files, [&root])?;
    tonic_prost_build::configure().build_server(true).build_client(true).compile_fds(descriptors)?;
    Ok(())
}
