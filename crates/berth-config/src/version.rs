//! The version we speak, and what we call ourselves. Pure.

/// The version of the reference whose behaviour this is.
pub const VERSION: &str = "v1.36.2";
/// Its major version.
pub const MAJOR: &str = "1";
/// Its minor version.
pub const MINOR: &str = "36";
/// The one minor version whose hidden metrics may be shown.
pub const PREVIOUS: &str = "1.35";
/// Our own version.
pub const BERTH: &str = env!("CARGO_PKG_VERSION");
/// What compiled us, in place of Go's compiler.
pub const COMPILER: &str = "rustc";

/// `os/arch` in Go's words.
pub fn platform() -> String {
    let arch = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "powerpc64" => "ppc64le",
        other => other,
    };
    format!("{}/{arch}", std::env::consts::OS)
}

/// What `--version=raw` prints.
pub fn raw(reported: &str) -> String {
    format!(
        "version.Info{{Major:\"{MAJOR}\", Minor:\"{MINOR}\", GitVersion:\"{reported}\", GitCommit:\"\", \
         GitTreeState:\"clean\", BuildDate:\"\", GoVersion:\"\", Compiler:\"{COMPILER}\", Platform:\"{}\"}}",
        platform()
    )
}
