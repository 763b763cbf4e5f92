//! Command line, working directory, and log path of a container. Pure.
//! Implements spec 09a §6.1, §6.3, §3.2 (log path).

use std::path::{Component, Path, PathBuf};

use super::{image::ImageConfig, refusal::LaunchError};

/// Merges the command and arguments of the request with `Entrypoint` and `Cmd` of the image. Protobuf cannot
/// distinguish an absent list from an empty one: both count as absent.
///
/// # Errors
/// Nothing is left to execute, or an argument contains a NUL.
pub fn args(command: &[String], args: &[String], image: &ImageConfig) -> Result<Vec<String>, LaunchError> {
    let of_image = command.is_empty();
    let entrypoint = if image.entrypoint == [""] { &[][..] } else { &image.entrypoint };
    let command = if of_image { entrypoint } else { command };
    let args = if of_image && args.is_empty() { &image.cmd } else { args };
    let words: Vec<String> = command.iter().chain(args).cloned().collect();
    if words.is_empty() {
        return Err(LaunchError::plain("no command specified"));
    }
    match words.iter().find(|word| word.contains('\0')) {
        Some(word) => Err(LaunchError::invalid(format!("argument {word:?} contains a NUL byte"))),
        None => Ok(words),
    }
}

/// The absolute working directory: the request's, else the image's, else `/`.
///
/// # Errors
/// The request names a relative path, or a path contains a NUL.
pub fn working_dir(requested: &str, image: &ImageConfig) -> Result<String, LaunchError> {
    if requested.contains('\0') || image.working_dir.contains('\0') {
        return Err(LaunchError::invalid("working directory contains a NUL byte"));
    }
    if requested.is_empty() {
        return Ok(absolute(&image.working_dir));
    }
    if !requested.starts_with('/') {
        return Err(LaunchError::invalid(format!("working directory {requested:?} is not absolute")));
    }
    Ok(absolute(requested))
}

/// Makes a path absolute and removes `.`, `..`, and double slashes; `..` of the root is the root.
pub fn absolute(path: &str) -> String {
    let mut names: Vec<&str> = Vec::new();
    for name in path.split('/') {
        match name {
            "" | "." => {}
            ".." => {
                names.pop();
            }
            name => names.push(name),
        }
    }
    format!("/{}", names.join("/"))
}

/// The path of the container log; `None` where logging is disabled (directory or path empty).
///
/// # Errors
/// The path escapes the pod's log directory.
pub fn log_path(directory: &str, path: &str) -> Result<Option<PathBuf>, LaunchError> {
    if Path::new(path).components().any(|part| !matches!(part, Component::Normal(_) | Component::CurDir)) {
        return Err(LaunchError::invalid(format!("log path {path:?} is not below the log directory")));
    }
    Ok((!directory.is_empty() && !path.is_empty()).then(|| Path::new(directory).join(path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(|word| word.replace("''", "")).collect()
    }

    fn runs(name: &str, entrypoint: &str, cmd: &str, command: &str, given: &str, expected: &str) {
        let image = ImageConfig { entrypoint: words(entrypoint), cmd: words(cmd), ..ImageConfig::default() };
        let got = args(&words(command), &words(given), &image).map_err(|refusal| refusal.text);
        let expected = if expected == "!" { Err("no command specified".to_owned()) } else { Ok(words(expected)) };
        assert_eq!(got, expected, "{name}");
    }

    #[test]
    fn request_and_image_give_the_words() {
        runs("AC-09a-X1", "a", "b", "", "c", "a c");
        runs("AC-09a-X2", "a", "b", "x", "", "x");
        runs("both of the image", "a", "b", "", "", "a b");
        runs("both of the request", "a", "b", "x", "y", "x y");
        runs("empty entrypoint", "''", "b", "", "", "b");
        runs("entrypoint of two, one empty", "'' a", "b", "", "", "'' a b");
        runs("no entrypoint", "", "b", "", "", "b");
        runs("only args", "", "", "", "y", "y");
        runs("nothing", "", "", "", "", "!");
        runs("nothing but an empty entrypoint", "''", "", "", "", "!");
        let nul = args(&["a\0".to_owned()], &[], &ImageConfig::default());
        assert_eq!(nul.map_err(|r| r.kind), Err(super::super::refusal::LaunchErrorKind::InvalidArgument));
    }

    #[test]
    fn directories_are_absolute() {
        for (requested, image, expected) in [
            ("", "", Ok("/")),
            ("", "srv", Ok("/srv")),
            ("", "/a/../../b//", Ok("/b")),
            ("/x", "/srv", Ok("/x")),
            ("x", "/srv", Err("working directory \"x\" is not absolute")),
        ] {
            let image = ImageConfig { working_dir: image.to_owned(), ..ImageConfig::default() };
            let got = working_dir(requested, &image).map_err(|refusal| refusal.text);
            assert_eq!(got.as_deref().map_err(String::as_str), expected, "{requested}");
        }
    }

    #[test]
    fn logs_stay_below_their_directory() {
        for (directory, path, expected) in [
            ("/var/log/pods/a", "c/0.log", Ok(Some("/var/log/pods/a/c/0.log"))),
            ("", "c/0.log", Ok(None)),
            ("/d", "", Ok(None)),
            ("/d", "/etc/x", Err(())),
            ("/d", "../x", Err(())),
            ("/d", "a/../../x", Err(())),
        ] {
            let got = log_path(directory, path).map_err(|_| ());
            assert_eq!(got, expected.map(|path| path.map(PathBuf::from)), "{directory} {path}");
        }
    }
}
