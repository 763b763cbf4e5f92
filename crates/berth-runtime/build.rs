//! Packs the shim's program into the library where it was built before.

use std::{env, error::Error, fs, path::PathBuf};

/// zstd's level for what is packed once.
const BEST: i32 = 19;

/// `BERTH_SHIM` names the shim's program (`make release` sets it). Without it `berth` looks beside itself.
fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-env-changed=BERTH_SHIM");
    println!("cargo:rustc-check-cfg=cfg(embeds_shim)");
    let Some(path) = env::var_os("BERTH_SHIM").filter(|path| !path.is_empty()) else { return Ok(()) };
    let path = fs::canonicalize(&path).map_err(|e| format!("BERTH_SHIM {}: {e}", path.display()))?;
    println!("cargo:rerun-if-changed={}", path.display());
    // Two thirds of it are air, and it is needed once a start.
    let packed = zstd::encode_all(fs::File::open(&path)?, BEST)?;
    fs::write(PathBuf::from(env::var("OUT_DIR")?).join("shim.zst"), packed)?;
    println!("cargo:rustc-cfg=embeds_shim");
    Ok(())
}
