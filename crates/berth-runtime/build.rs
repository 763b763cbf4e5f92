//! Embeds the zstd-compressed shim binary into the library when `BERTH_SHIM` names it.

use std::{env, error::Error, fs, path::PathBuf};

/// zstd compression level. The build compresses the shim once, so the highest ratio of the regular levels pays off.
const BEST: i32 = 19;

/// `BERTH_SHIM` is the path of the shim binary (`make release` sets it). Without it nothing is embedded, and `berth`
/// searches for the shim next to its own executable.
fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-env-changed=BERTH_SHIM");
    println!("cargo:rustc-check-cfg=cfg(embeds_shim)");
    let Some(path) = env::var_os("BERTH_SHIM").filter(|path| !path.is_empty()) else { return Ok(()) };
    let path = fs::canonicalize(&path).map_err(|e| format!("BERTH_SHIM {}: {e}", path.display()))?;
    println!("cargo:rerun-if-changed={}", path.display());
    // Compression saves about two thirds of the size; the binary is unpacked once per start.
    let packed = zstd::encode_all(fs::File::open(&path)?, BEST)?;
    fs::write(PathBuf::from(env::var("OUT_DIR")?).join("shim.zst"), packed)?;
    println!("cargo:rustc-cfg=embeds_shim");
    Ok(())
}
