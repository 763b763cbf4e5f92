//! Image list as text tables. Pure.

use jiff::Timestamp;

use crate::cli::table::{self, columns};
use berth_runtime::images::commands::Image;

/// Displayed hexadecimal digits of an id.
const SHORT: usize = 12;
const NONE: &str = "<none>";

/// Renders name, tag, id, age, and size: one row per name.
pub(super) fn narrow(images: &[Image], now: Timestamp) -> String {
    let mut rows = vec![["REPOSITORY", "TAG", "IMAGE ID", "AGE", "SIZE"].map(str::to_owned).to_vec()];
    for image in images {
        for (repository, tag) in names(image) {
            rows.push(vec![repository, tag, short(&image.id), age(&image.created, now), size(image.size)]);
        }
    }
    columns(&rows)
}

/// Renders also digest, platform, source, and whether the image is pinned.
pub(super) fn wide(images: &[Image], now: Timestamp) -> String {
    let head = ["REPOSITORY", "TAG", "DIGEST", "IMAGE ID", "AGE", "SIZE", "PLATFORM", "SOURCE", "PINNED"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for image in images {
        let platform = [&image.platform.os, &image.platform.architecture, &image.platform.variant];
        let platform: Vec<&str> = platform.into_iter().map(String::as_str).filter(|part| !part.is_empty()).collect();
        for (repository, tag) in names(image) {
            let digest = image.repo_digests.iter().filter_map(|name| name.split_once('@'));
            let digest = digest.clone().find(|(name, _)| *name == repository).or_else(|| digest.clone().next());
            rows.push(vec![
                repository,
                tag,
                digest.map_or_else(|| NONE.to_owned(), |(_, digest)| short(digest)),
                short(&image.id),
                age(&image.created, now),
                size(image.size),
                platform.join("/"),
                format!("{:?}", image.source).to_lowercase(),
                image.pinned.to_string(),
            ]);
        }
    }
    columns(&rows)
}

/// Repository and tag of each name; the repository of the first digest if there is no tag.
fn names(image: &Image) -> Vec<(String, String)> {
    let tags = image.repo_tags.iter().filter_map(|name| name.rsplit_once(':'));
    let mut out: Vec<_> = tags.map(|(name, tag)| (name.to_owned(), tag.to_owned())).collect();
    if out.is_empty() {
        let repository =
            image.repo_digests.first().and_then(|name| name.split_once('@')).map_or(NONE, |(name, _)| name);
        out.push((repository.to_owned(), NONE.to_owned()));
    }
    out
}

fn short(digest: &str) -> String {
    digest.trim_start_matches("sha256:").chars().take(SHORT).collect()
}

/// Size with three digits and a decimal unit, as registries display it.
pub(super) fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "kB", "MB", "GB", "TB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    let name = UNITS.get(unit).copied().unwrap_or_default();
    match value {
        _ if unit == 0 => format!("{bytes}{name}"),
        value if value < 9.995 => format!("{value:.2}{name}"),
        value if value < 99.95 => format!("{value:.1}{name}"),
        value => format!("{value:.0}{name}"),
    }
}

fn age(created: &str, now: Timestamp) -> String {
    created.parse().map_or_else(|_| "<unknown>".to_owned(), |created| table::age(created, now))
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_runtime::images::record::{ImageOrigin, Platform};

    fn image(tags: &[&str], digests: &[&str]) -> Image {
        Image {
            id: format!("sha256:{}", "ab".repeat(32)),
            repo_tags: tags.iter().map(ToString::to_string).collect(),
            repo_digests: digests.iter().map(ToString::to_string).collect(),
            size: 4_270_000,
            pinned: false,
            source: ImageOrigin::Pull,
            platform: Platform { os: "linux".into(), architecture: "arm64".into(), variant: "v8".into() },
            created: "2026-01-01T00:00:00Z".into(),
            last_used: String::new(),
        }
    }

    #[test]
    fn a_line_for_each_name() {
        let now = "2026-01-01T03:00:00Z".parse().expect("a time");
        let digest = format!("h:5/a@sha256:{}", "cd".repeat(32));
        let images = [image(&["h:5/a:1", "h:5/a:2"], &[&digest]), image(&[], &[&digest]), image(&[], &[])];
        assert_eq!(
            narrow(&images, now),
            "REPOSITORY   TAG      IMAGE ID       AGE   SIZE\n\
             h:5/a        1        abababababab   3h    4.27MB\n\
             h:5/a        2        abababababab   3h    4.27MB\n\
             h:5/a        <none>   abababababab   3h    4.27MB\n\
             <none>       <none>   abababababab   3h    4.27MB\n"
        );
        let wide = wide(&images[..1], now);
        assert!(wide.contains("1     cdcdcdcdcdcd   abababababab   3h    4.27MB   linux/arm64/v8   pull"), "{wide}");
    }

    #[test]
    fn sizes_have_three_digits() {
        for (bytes, expected) in [
            (0, "0B"),
            (999, "999B"),
            (1000, "1.00kB"),
            (12_345, "12.3kB"),
            (999_499, "999kB"),
            (999_500, "1.00MB"),
            (5_000_000_000, "5.00GB"),
            (u64::MAX, "18446744TB"),
        ] {
            assert_eq!(size(bytes), expected, "{bytes}");
        }
    }
}
