//! Sandboxed layer unpacking process: same result as in-process unpacking, without other access.

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use berth_runtime::images::{
    ImageStore, ImageStoreSettings,
    layers::UnpackHelpers,
    unpacker::{self, LayerFormat, LayerLimits, UnpackPolicy, unpack_process},
};

use super::registry::layer;

const BERTH: &str = env!("CARGO_BIN_EXE_berth");

fn skips(test: &str) -> bool {
    let is_root = nix::unistd::geteuid().is_root();
    if !is_root {
        assert!(std::env::var_os("CI").is_none(), "{test} may not be skipped on CI");
        println!("skipped {test}: needs root");
    }
    !is_root
}

fn policy(form: LayerFormat) -> UnpackPolicy {
    UnpackPolicy { bounds: LayerLimits::default(), form, keep_free: 0 }
}

/// A layer with every kind of entry.
fn rich() -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut add = |kind: tar::EntryType, name: &str, link: &str, content: &[u8], mode: u32| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(content.len() as u64);
        header.set_mode(mode);
        header.set_uid(1000);
        header.set_gid(7);
        header.set_mtime(1_000_000_000);
        if kind.is_character_special() {
            header.set_device_major(1).and_then(|()| header.set_device_minor(3)).expect("small");
        }
        match link {
            "" => builder.append_data(&mut header, name, content).expect("in memory"),
            link => builder.append_link(&mut header, name, link).expect("in memory"),
        }
    };
    use tar::EntryType as T;
    add(T::Directory, "d", "", b"", 0o1777);
    add(T::Regular, "d/suid", "", b"content", 0o4755);
    add(T::Link, "d/again", "d/suid", b"", 0o4755);
    add(T::Directory, "etc", "", b"", 0o755);
    add(T::Symlink, "out", "/etc", b"", 0o777);
    add(T::Regular, "out/within", "", b"x", 0o600);
    add(T::Char, "null", "", b"", 0o666);
    add(T::Fifo, "pipe", "", b"", 0o600);
    add(T::Directory, "opaque", "", b"", 0o755);
    add(T::Regular, "opaque/.wh..wh..opq", "", b"", 0o600);
    add(T::Regular, ".wh.gone", "", b"", 0o600);
    // Deeper than the process's descriptor limit, and replaced by a file.
    let deep = (0..300).map(|_| "x").collect::<Vec<_>>().join("/");
    add(T::Directory, &deep, "", b"", 0o755);
    add(T::Regular, "x", "", b"file", 0o644);
    builder.into_inner().expect("in memory")
}

/// Metadata and content of everything below a directory, by path.
fn tree(folder: &Path) -> BTreeMap<String, String> {
    let mut out = BTreeMap::new();
    let mut left = vec![folder.to_owned()];
    while let Some(path) = left.pop() {
        let stat = fs::symlink_metadata(&path).expect("there");
        let mut opaque = [0; 8];
        let name = "trusted.overlay.opaque";
        let length = rustix::fs::lgetxattr(&path, name, &mut opaque).unwrap_or(0);
        let link = fs::read_link(&path).unwrap_or_default();
        let kind = stat.file_type();
        let content = if kind.is_file() { fs::read(&path).expect("readable") } else { Vec::new() };
        let device = if kind.is_char_device() { stat.rdev() } else { 0 };
        // Entries that the archive does not contain have the time of the test.
        let times = if stat.mtime() == 1_000_000_000 { stat.mtime() } else { 0 };
        let attributes =
            (stat.mode(), stat.uid(), stat.gid(), stat.nlink(), times, device, link, content, &opaque[..length]);
        out.insert(path.strip_prefix(folder).expect("below").display().to_string(), format!("{attributes:?}"));
        if kind.is_dir() {
            left.extend(fs::read_dir(&path).expect("listable").map(|entry| entry.expect("an entry").path()));
        }
    }
    out
}

#[test]
fn a_layer_comes_out_as_if_we_had_unpacked_it() {
    if skips("a_layer_comes_out_as_if_we_had_unpacked_it") {
        return;
    }
    let place = tempfile::tempdir().expect("a directory");
    let at = |name: &str| place.path().join(name);
    let rules = policy(LayerFormat::Overlay { userxattr: false });
    ["own", "other"].into_iter().for_each(|name| fs::create_dir(at(name)).expect("makeable"));
    let bytes = rich();
    let recipe = fs::File::create_new(at("own.recipe")).expect("makeable");
    let own = unpacker::apply_noting(&bytes[..], &at("own"), &rules, Some(recipe)).expect("unpacked");
    let job = |into: &str| unpack_process::UnpackJob {
        into: at(into),
        recipe: at(&format!("{into}.recipe")),
        policy: rules,
        parent: std::process::id(),
    };
    let other = unpack_process::apply(&bytes[..], Path::new(BERTH), &job("other")).expect("unpacked");
    assert_eq!(own, other);
    let (own, other) = (tree(&at("own")), tree(&at("other")));
    assert_eq!(own, other);
    assert!(own.len() >= 10 && own["opaque"].ends_with("[121])"), "{own:?}");
    assert!(!Path::new("/etc/within").exists() && own.contains_key("etc/within"), "{own:?}");
    assert_eq!(fs::read(at("own.recipe")).expect("there"), fs::read(at("other.recipe")).expect("there"));
    // Errors have the same text.
    fs::create_dir(at("cut")).expect("makeable");
    let error = unpack_process::apply(&bytes[..700], Path::new(BERTH), &job("cut")).expect_err("cut");
    fs::create_dir(at("again")).expect("makeable");
    assert_eq!(error, unpacker::apply(&bytes[..700], &at("again"), &rules).expect_err("cut"));
}

/// The unpacking process; killed when dropped.
struct UnpackProcess(Child);

impl Drop for UnpackProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn who_unpacks_has_nothing_but_the_layers_directory() {
    if skips("who_unpacks_has_nothing_but_the_layers_directory") {
        return;
    }
    // Noise does not compress, so that half of the compressed bytes are half of the layer, too.
    let noise: Vec<u8> = (0..200_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let plain = layer("f", &noise);
    has_nothing_but_the_layers_directory(&plain, &["berth"]);
    has_nothing_but_the_layers_directory(&super::registry::gzip(&plain), &["berth", "decompress"]);
}

/// Inspects each thread after half of the layer is read.
fn has_nothing_but_the_layers_directory(packed: &[u8], threads: &[&str]) {
    let place = tempfile::tempdir().expect("a directory");
    let into = place.path().join("d");
    fs::create_dir(&into).expect("makeable");
    let rules = policy(LayerFormat::Overlay { userxattr: false });
    let recipe = place.path().join("recipe");
    let job = unpack_process::UnpackJob { into: into.clone(), recipe, policy: rules, parent: std::process::id() };
    let mut command = Command::new(BERTH);
    command.arg(unpack_process::VERB).arg(serde_json::to_string(&job).expect("JSON"));
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("starts");
    let mut child = UnpackProcess(child);
    let mut stdin = child.0.stdin.take().expect("piped");
    stdin.write_all(&packed[..packed.len() / 2]).expect("written");
    let proc = Path::new("/proc").join(child.0.id().to_string());
    let begun = Instant::now();
    while !into.join("f").exists() {
        assert!(begun.elapsed() < Duration::from_secs(20), "it does not begin");
        std::thread::yield_now();
    }
    let mut names = Vec::new();
    for task in fs::read_dir(proc.join("task")).expect("listable") {
        let task = task.expect("a thread").path();
        names.push(fs::read_to_string(task.join("comm")).expect("there").trim().to_owned());
        assert_confined(&task, &into);
    }
    names.sort();
    assert_eq!(names, threads);
    drop(stdin);
    assert!(!child.0.wait().expect("ended").success(), "the layer was cut");
}

fn assert_confined(task: &Path, into: &Path) {
    assert_eq!(fs::read_link(task.join("root")).expect("there"), into);
    let own = |name: &str| fs::read_link(Path::new("/proc/self").join(name)).expect("there");
    for name in ["ns/mnt", "ns/net"] {
        assert_ne!(fs::read_link(task.join(name)).expect("there"), own(name), "{name}");
    }
    let status = fs::read_to_string(task.join("status")).expect("there");
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect(name);
        u64::from_str_radix(line.trim(), 16).expect("a number")
    };
    // CHOWN DAC_OVERRIDE FOWNER FSETID SYS_ADMIN MKNOD SETFCAP
    let kept = 1 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 21 | 1 << 27 | 1 << 31;
    for name in ["CapEff:", "CapPrm:", "CapBnd:"] {
        assert_eq!(field(name) & !kept, 0, "{name} {status}");
    }
    assert_eq!((field("CapInh:"), field("CapAmb:"), field("NoNewPrivs:")), (0, 0, 1));
    let limits = fs::read_to_string(task.join("limits")).expect("there");
    let files = limits.lines().find_map(|line| line.strip_prefix("Max open files")).expect("received");
    assert!(files.split_whitespace().take(2).all(|limit| limit == "256"), "{files}");
}

#[tokio::test]
async fn a_crashed_decoder_is_an_error_and_leaves_nothing() {
    if skips("a_crashed_decoder_is_an_error_and_leaves_nothing") {
        return;
    }
    let place = tempfile::tempdir().expect("a directory");
    let archive = place.path().join("a.tar");
    fs::write(&archive, super::registry::saved(&[layer("f", b"x")])).expect("writable");
    let open = async |unpacker: &str| {
        let helpers = UnpackHelpers { unpacker: Some(unpacker.into()), unpacks: None };
        let settings = ImageStoreSettings { helpers, ..ImageStoreSettings::new(place.path().join("root")) };
        ImageStore::open(settings).await.expect("opens")
    };
    let error = open("/bin/false").await.import(&archive, None).await.expect_err("it dies");
    assert!(error.text.contains("exited without a result: exit code 1"), "{error}");
    assert_eq!(fs::read_dir(place.path().join("root/layers")).expect("there").count(), 0);
    assert_eq!(open(BERTH).await.import(&archive, None).await.expect("imported").len(), 1);
}
