//! Tools `echo`, `cat`, `env`, `ls`, and `id`.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::{FileTypeExt, MetadataExt},
    process::Command,
};

use super::{UNKNOWN, is_known};

/// Prints its arguments; `-n` omits the newline.
pub fn echo(args: &[String]) -> io::Result<i32> {
    let (end, words) = match args.split_first() {
        Some((first, rest)) if first == "-n" => ("", rest),
        _ => ("\n", args),
    };
    let mut out = io::stdout().lock();
    write!(out, "{}{end}", words.join(" "))?;
    out.flush()?;
    Ok(0)
}

/// Prints files, or standard input.
pub fn cat(args: &[String]) -> io::Result<i32> {
    let mut out = io::stdout().lock();
    let mut code = 0;
    let names = if args.is_empty() { &["-".to_owned()][..] } else { args };
    for name in names {
        let copied = match name.as_str() {
            "-" => io::copy(&mut io::stdin().lock(), &mut out),
            name => File::open(name).and_then(|mut file| io::copy(&mut file, &mut out)),
        };
        if let Err(error) = copied {
            writeln!(io::stderr(), "cat: {name}: {error}")?;
            code = 1;
        }
    }
    out.flush()?;
    Ok(code)
}

/// Prints the environment, or runs a program in a modified one: `env [NAME=value]… [program…]`.
pub fn env(args: &[String]) -> io::Result<i32> {
    let set = args.iter().take_while(|arg| arg.contains('=')).count();
    let (set, program) = args.split_at(set);
    let mut all: BTreeMap<String, String> = std::env::vars_os()
        .map(|(k, v)| (k.to_string_lossy().into_owned(), v.to_string_lossy().into_owned()))
        .collect();
    all.extend(set.iter().filter_map(|pair| pair.split_once('=')).map(|(k, v)| (k.to_owned(), v.to_owned())));
    let Some((program, args)) = program.split_first() else {
        let mut out = io::stdout().lock();
        all.iter().try_for_each(|(name, value)| writeln!(out, "{name}={value}"))?;
        return Ok(0);
    };
    spawn(program, args, &all)
}

/// Runs another program, or this one as another tool, and waits for it. Returns its exit code; 127 for a missing program.
///
/// # Errors
/// If it cannot be started for another reason than a missing program.
pub fn spawn(program: &str, args: &[String], env: &BTreeMap<String, String>) -> io::Result<i32> {
    use std::os::unix::process::{CommandExt, ExitStatusExt};
    let mut command = Command::new(program);
    if is_known(program) {
        command = Command::new("/proc/self/exe");
        command.arg0(program);
    }
    match command.args(args).env_clear().envs(env).status() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            writeln!(io::stderr(), "{program}: not found")?;
            Ok(UNKNOWN)
        }
        other => other.map(|status| status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))),
    }
}

/// Lists directories; `-l` with mode, owner, and size, `-a` with hidden entries.
pub fn ls(args: &[String]) -> io::Result<i32> {
    let flags: String = args.iter().filter_map(|arg| arg.strip_prefix('-')).collect();
    let mut names: Vec<&str> = args.iter().filter(|arg| !arg.starts_with('-')).map(String::as_str).collect();
    if names.is_empty() {
        names.push(".");
    }
    let mut out = io::stdout().lock();
    let mut code = 0;
    for name in &names {
        let listed = entries(name, flags.contains('a'));
        let listed = match listed {
            Ok(listed) => listed,
            Err(error) => {
                writeln!(io::stderr(), "ls: {name}: {error}")?;
                code = 1;
                continue;
            }
        };
        if names.len() > 1 {
            writeln!(out, "{name}:")?;
        }
        for (name, metadata) in listed {
            if flags.contains('l') {
                let (kind, mode) = (kind(&metadata), metadata.mode() & 0o7777);
                writeln!(
                    out,
                    "{kind}{mode:04o} {:>5} {:>5} {:>10} {name}",
                    metadata.uid(),
                    metadata.gid(),
                    metadata.len()
                )?;
            } else {
                writeln!(out, "{name}")?;
            }
        }
    }
    Ok(code)
}

fn entries(name: &str, shows_hidden: bool) -> io::Result<Vec<(String, fs::Metadata)>> {
    let metadata = fs::symlink_metadata(name)?;
    if !fs::metadata(name).is_ok_and(|metadata| metadata.is_dir()) {
        return Ok(vec![(name.to_owned(), metadata)]);
    }
    let mut out = Vec::new();
    for entry in fs::read_dir(name)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if shows_hidden || !name.starts_with('.') {
            out.push((name, entry.metadata()?));
        }
    }
    out.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(out)
}

fn kind(metadata: &fs::Metadata) -> char {
    let kind = metadata.file_type();
    match () {
        () if kind.is_dir() => 'd',
        () if kind.is_symlink() => 'l',
        () if kind.is_char_device() => 'c',
        () if kind.is_block_device() => 'b',
        () if kind.is_fifo() => 'p',
        () if kind.is_socket() => 's',
        () => '-',
    }
}

/// Prints user and group ids: `-u`, `-g`, `-G`, or all.
pub fn id(args: &[String]) -> io::Result<i32> {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let mut groups: Vec<u32> = rustix::process::getgroups()?.into_iter().map(|group| group.as_raw()).collect();
    groups.push(gid);
    groups.sort_unstable();
    groups.dedup();
    let list = |separator: &str| groups.iter().map(u32::to_string).collect::<Vec<_>>().join(separator);
    let mut out = io::stdout().lock();
    match args.first().map(String::as_str) {
        Some("-u") => writeln!(out, "{uid}")?,
        Some("-g") => writeln!(out, "{gid}")?,
        Some("-G") => writeln!(out, "{}", list(" "))?,
        _ => writeln!(out, "uid={uid} gid={gid} groups={}", list(","))?,
    }
    Ok(0)
}
