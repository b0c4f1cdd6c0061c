#!/usr/bin/env bash
# Posts what the gate of a pull request said as one comment, and edits that comment after a new run.
#
# gate-comment.yml runs it from the default branch, where it may write comments. The artifacts
# gate-comment-hosted and gate-comment-gpu come from a run of the author's code: nothing in them is
# executed. `pr.txt` must be the number of an open pull request whose head is the commit that ran.
# Mentions, links, entities and tags are removed from `comment.md`.
#
# Environment: GH_TOKEN, GH_REPO, and of the run, as GitHub states them: RUN_ID, RUN_URL, HEAD_SHA,
# HEAD_REPOSITORY.
set -euo pipefail

most_bytes=262144     # of a page that is read
most_characters=32000 # of a page that is posted; GitHub refuses comments of more than 65,536

refuse() {
  echo "::error title=gate comment::$1"
  exit 1
}

# Controls, direction marks and invisible characters go; a zero-width space breaks the rest.
harmless() {
  perl -CSD -0777 -pe '
    s/\r\n?/\n/g;
    s/[^\P{C}\n]//g;
    s/[&@]/$&\x{200b}/g;
    s/</&lt;/g;
    s|://|:\x{200b}//|g;
    s/\](?=[(:\[])/]\x{200b}/g;
    s/\bwww\./www\x{200b}./gi;
    s/(#|\bGH-)(?=\d)/$1\x{200b}/g;
    $_ = substr($_, 0, '"$most_characters"') . "\n\nThe page is cut; the run has the rest.\n"
      if length > '"$most_characters"';
  ' "$1"
}

folder=$(mktemp -d)
number=
names=$(gh api "repos/$GH_REPO/actions/runs/$RUN_ID/artifacts?per_page=100" --jq '.artifacts[].name')
for name in gate-comment-hosted gate-comment-gpu; do
  grep -qx "$name" <<< "$names" || continue
  gh run download "$RUN_ID" --name "$name" --dir "$folder/$name"
  page=$folder/$name/comment.md number=$(head -c 16 "$folder/$name/pr.txt")
  [ -f "$page" ] && [ ! -L "$page" ] || refuse "$name has no page"
  [ "$(wc -c < "$page")" -le "$most_bytes" ] || refuse "the page of $name is too long"
  [[ $number =~ ^[1-9][0-9]{0,8}$ ]] || refuse "pr.txt of $name is not a number"
  pull=$(gh api "repos/$GH_REPO/pulls/$number" \
    --jq '[.state, .head.sha, .head.repo.full_name] | join(" ")')
  if [ "$pull" != "open $HEAD_SHA $HEAD_REPOSITORY" ]; then
    echo "not posted: pull request $number is closed, or its head is not the commit that ran"
    exit 0
  fi
  printf '\n\n' >> "$folder/pages"
  harmless "$page" >> "$folder/pages"
done

if [ -z "$number" ]; then
  echo "the run left no page: nothing to post"
  exit 0
fi
{
  echo "_The run of this change's author wrote this page: the check, not the page, decides._"
  cat "$folder/pages"
  printf '\n\n[Run %s](%s) of %s\n' "$RUN_ID" "$RUN_URL" "${HEAD_SHA:0:12}"
} > "$folder/body.md"
gh pr comment "$number" --edit-last --create-if-none --body-file "$folder/body.md"
